"""Training data: multi-query associative recall and long documents. Knows nothing of models."""

from data.documents import DocumentsDataModule
from data.mqar import MQARDataModule

__all__ = ["DocumentsDataModule", "MQARDataModule"]
