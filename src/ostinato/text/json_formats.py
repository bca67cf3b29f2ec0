"""The values of `format` as regular expressions: the texts that llguidance allows for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_YEAR_TO_DAY: Final = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
)
_HOUR: Final = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOUR}:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+-]{_HOUR})"
_N: Final = "[0-9]+"
_DAYS: Final = f"({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)"
_HOURS: Final = f"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_OCTET: Final = "([0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
_IPV4: Final = rf"{_OCTET}(\.{_OCTET}){{3}}"
_LABEL: Final = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_SHORT_LABEL: Final = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM: Final = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]+"
_H: Final = "[0-9a-fA-F]{1,4}"
_IPV6: Final = "|".join(
    [
        f"({_H}:){{7}}{_H}",
        f"::({_H}:){{0,5}}{_H}:{_H}",
        *(f"(({_H}:){{0,{n}}}{_H})?::({_H}:){{0,{4 - n}}}{_H}:{_H}" for n in range(3)),
        f"(({_H}:){{0,3}}{_H})?::{_H}:{_H}:{_H}",
        f"(({_H}:){{0,4}}{_H})?::{_H}:{_H}",
        f"(({_H}:){{0,5}}{_H})?::{_H}",
        f"(({_H}:){{0,6}}{_H})?::",
    ]
)
_PERCENT: Final = "%[0-9a-fA-F]{2}"
_PLAIN: Final = r"a-zA-Z0-9\-._~!$&'()*+,;="  # of a class
_IN_PATH: Final = rf"([{_PLAIN}:@]|{_PERCENT})"
_IN_QUERY: Final = rf"([{_PLAIN}:@/?]|{_PERCENT})"
_IN_BRACKETS: Final = "|".join(
    [
        f"({_H}:){{7}}{_H}",
        f"({_H}:){{1,7}}:",
        f"({_H}:){{1,6}}:{_H}",
        *(f"({_H}:){{1,{6 - n}}}(:{_H}){{1,{n + 1}}}" for n in range(1, 6)),
        f":(:{_H}){{1,7}}",
        "::",
        rf"v[0-9a-fA-F]+\.[{_PLAIN}:]+",
    ]
)
_HOST: Final = rf"(\[({_IN_BRACKETS})\]|{_IPV4}|([{_PLAIN}]|{_PERCENT})*)"
_URI: Final = (
    rf"[a-zA-Z][a-zA-Z0-9+\-.]*:"
    rf"(//(([{_PLAIN}:]|{_PERCENT})*@)?{_HOST}(:[0-9]*)?(/{_IN_PATH}*)*"
    rf"|/({_IN_PATH}+(/{_IN_PATH}*)*)?|{_IN_PATH}+(/{_IN_PATH}*)*|)"
    rf"(\?{_IN_QUERY}*)?(\#{_IN_QUERY}*)?"
)

PATTERNS: Final[Mapping[str, str]] = {
    "date": _YEAR_TO_DAY,
    "date-time": f"{_YEAR_TO_DAY}[tT]{_TIME}",
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|{_N}W)",
    "email": rf"{_ATOM}(\.{_ATOM})*@({_LABEL}(\.{_LABEL})*|\[{_IPV4}\])",
    "hostname": rf"{_SHORT_LABEL}(\.{_SHORT_LABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "time": _TIME,
    "uri": _URI,
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
