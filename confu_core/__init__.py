"""ConFu Explorer's engine: speculative decoding that can be watched.

    from confu_core import Settings, load_engine

    engine = load_engine()
    for event in engine.compare("Why is the sky blue?", Settings(max_new_tokens=32)):
        ...

Names are loaded when they are first used, so that reading a trace needs no torch.
"""

from importlib import import_module

_PROMISED = {
    "load_engine": "compare",
    "Engine": "compare",
    "Started": "events",
    "Advanced": "events",
    "Finished": "events",
    "MethodInfo": "events",
    "decode": "decoding",
    "check_settings": "decoding",
    "Round": "decoding",
    "Observer": "probes",
    "Recorder": "recording",
    "Settings": "trace",
    "Trace": "trace",
    "ConFuError": "errors",
}
__all__ = sorted(_PROMISED)


def __getattr__(name: str):
    if name not in _PROMISED:
        raise AttributeError(f"module 'confu_core' has no attribute {name!r}")
    return getattr(import_module(f"confu_core.{_PROMISED[name]}"), name)
