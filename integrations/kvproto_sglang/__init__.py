"""kvproto for SGLang: a disaggregation back end for prefill and decode engines, installed beside an unmodified SGLang.

    KVPROTO_SGLANG='{"name": ...}' python -m sglang.launch_server ... --disaggregation-transfer-backend kvproto

docs/sglang-reference.md says the rest.
"""

from kvproto.distributions import check_versions

check_versions("kvproto-sglang")

from kvproto_sglang.tickets import ticket_of  # noqa: E402 after the check

__all__ = ["register", "ticket_of"]


def register() -> None:
    """Install the back end: SGLang calls this in each of its processes, by entry point group `sglang.srt.plugins`."""
    from kvproto_engines import check_engine

    check_engine("sglang", "kvproto-sglang")
    from kvproto_sglang.plugin import install

    install()
