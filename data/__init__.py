"""Training data: multi-query associative recall and long documents. Knows nothing of models.

Imported on first use: preparing a store, and its worker processes, need neither torch nor Lightning.
"""

_MODULES = {"MQARDataModule": "data.mqar", "DocumentsDataModule": "data.documents"}
__all__ = ["DocumentsDataModule", "MQARDataModule"]


def __getattr__(name: str) -> type:
    if name not in _MODULES:
        raise AttributeError(f"module 'data' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
