"""Models: loading, attention, fast operators and GPU kernels."""


def __getattr__(name: str) -> object:
    if name != "resolve_model":  # documents of release 0.1.0 import it from here
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stalewise.models.loading import resolve_model

    return resolve_model
