"""Canonical JSON against the published vectors of RFC 8785 and its reference repository."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfulp import canonical
from halfulp.errors import CorruptionError, UsageError

# RFC 8785, appendix B, and the sample lines of the repository cyberphone/json-canonicalization
# (testdata/README.md): the bits of a double and how ECMAScript writes it.
NUMBERS = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4340000000000001": "9007199254740994",
    "4340000000000002": "9007199254740996",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}

# testdata/input and testdata/output of the same repository: weird, structures, values, french.
DOCUMENTS = {
    "weird": (
        r"""{"\u20ac": "Euro Sign", "1": "One", "\u0080": "Control\u007f", "\ud83d\ude02": "Smiley",
        "\u00f6": "Latin Small Letter O With Diaeresis", "\ufb33": "Hebrew Letter Dalet With Dagesh",
        "</script>": "Browser Challenge"}""",
        '{"1":"One","</script>":"Browser Challenge","\u0080":"Control\u007f",'
        '"\u00f6":"Latin Small Letter O With Diaeresis","\u20ac":"Euro Sign","\U0001f602":"Smiley",'
        '"\ufb33":"Hebrew Letter Dalet With Dagesh"}',
    ),
    "structures": (
        r"""{"1": {"f": {"f": "hi","F": 5} ,"\n": 56.0}, "10": { }, "": "empty", "a": { }, "111": [ { } ],
        "A": { }}""",
        r'{"":"empty","1":{"\n":56,"f":{"F":5,"f":"hi"}},"10":{},"111":[{}],"A":{},"a":{}}',
    ),
    "values": (
        r"""{"numbers": [1E30, 4.50, 333333333.33333329, 2e-3, 0.000000000000000000000000001],
        "escaping": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}""",
        '{"escaping":"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/","literals":[null,true,false],'
        '"numbers":[1e+30,4.5,333333333.3333333,0.002,1e-27]}',
    ),
    "french": (
        '{"peach": "1", "p\u00e9ch\u00e9": "2", "p\u00eache": "3", "sin": "4"}',
        '{"peach":"1","p\u00e9ch\u00e9":"2","p\u00eache":"3","sin":"4"}',
    ),
}


@pytest.mark.parametrize(("bits", "text"), NUMBERS.items())
def test_numbers_of_the_rfc(bits: str, text: str) -> None:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical.number(value) == text
    assert canonical.dumps([value]) == f"[{text}]".encode()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_of_the_reference_repository(name: str) -> None:
    given_, expected = DOCUMENTS[name]
    assert canonical.dumps(json.loads(given_)) == expected.encode()
    assert canonical.dumps(canonical.loads(expected.encode(), name)) == expected.encode()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_reads_back_as_itself(value: float) -> None:
    text = canonical.number(value)
    assert float(text) == value
    assert canonical.number(float(text)) == text
    # Nothing but layout differs from Python's shortest form, so there are never more digits than there.
    assert len(text.strip("-0.").partition("e")[0].replace(".", "").strip("0")) <= 17


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-canonical.LARGEST, canonical.LARGEST)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda below: st.lists(below, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), below, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
def test_reading_and_writing_again_gives_the_same_bytes(value: object) -> None:
    content = canonical.dumps(value)
    assert canonical.dumps(canonical.loads(content, "here")) == content
    assert canonical.loads(content, "here") == value


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ({"a": math.nan}, "value.a: nan is not JSON"),
        ([math.inf], "inf is not JSON"),
        ({"seed": 2**53}, "value.seed: 9007199254740992 is beyond"),
        ({1: 2}, "the key 1 is not text"),
        ({"a": {1, 2}}, "builtins.set"),
        ("\ud800", "surrogate"),
        (b"bytes", "builtins.bytes"),
    ],
)
def test_what_has_no_canonical_form_is_refused(value: object, part: str) -> None:
    with pytest.raises(UsageError) as raised:
        canonical.dumps(value)
    assert part in str(raised.value)


def test_depth_is_limited() -> None:
    value: list[object] = []
    for _ in range(200):
        value = [value]
    with pytest.raises(UsageError, match="nested"):
        canonical.dumps(value)
    with pytest.raises(CorruptionError, match="here"):
        canonical.loads(b"[" * 100_000 + b"]" * 100_000, "here")


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": 1}', b'{"b":1,"a":2}', b'{"a":1.0}', b'{"a":1,"a":1}', b"[1e2]", b"[NaN]", b"[-0]", b"\xff",
        b"", b"[1]\n", b'["\\u0041"]', b"[1" + b"0" * 500 + b"]",
    ],
)  # fmt: skip
def test_other_forms_are_not_read(content: bytes) -> None:
    with pytest.raises(CorruptionError, match="the-file"):
        canonical.loads(content, "the-file")
