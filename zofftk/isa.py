"""The instruction set of the compiled kernels, asked for before anything starts."""

from zofftk.errors import InputError


def check_isa() -> str:
    """Its name; raises InputError where ZOFFTK_ISA asks for one that does not exist or that this processor lacks."""
    from zofftk import _cpu_adam

    try:
        return _cpu_adam.isa()
    except (ValueError, RuntimeError) as error:
        raise InputError(f"ZOFFTK_ISA: {error}") from None
