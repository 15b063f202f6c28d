"""A study in words, before anything runs: everything that will be sealed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from halfulp import canonical
from halfulp.study.declaration import Protocol
from halfulp.study.protocol import Json, Rule
from halfulp.text import count, plain

SCOPES = {"all": "in every unit", "mean": "in the mean over units", "unit": "unit by unit"}
WIDTH, TABLE = 100, 120
"""Of a line and of a table; of a table that is wider, each cell becomes a paragraph."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.,@/+-]*")


def lines(protocol: Protocol) -> Iterator[str]:
    """All of a protocol, a line a thing; what cells share is said once."""
    content = protocol.content
    yield f"{content['study']} ({content['scale']})"
    yield ""
    yield f"question     {plain(content['question'])}"
    yield f"units        {plain(content['units'])}"
    for claim in content["not_claimed"]:
        yield f"not claimed  {plain(claim)}"
    yield from _packed("config       ", _config(content["config"]))
    for name in content["data"]:
        yield f"data         {plain(name)}"
    for one in protocol.evidence:
        uses = ", ".join(plain(text) for key in ("records", "attached", "estimands") for text in one[key])
        closed = f"; closed until stage {one['after']} is sealed" if "after" in one else ""
        yield f"evidence     {one['name']}: study {one['study']} ({one['scale']}), of which {uses}{closed}"
    yield f"threads      {content['threads']} a worker process"
    yield f"retries      {content['retries']}"
    for stage in content["stages"]:
        yield ""
        reads = f", reads {', '.join(stage['reads'])}" if stage["reads"] else ""
        gates = f", only if {' and '.join(stage['only_if'])} passed" if "only_if" in stage else ""
        cells = f"{count(len(stage['cells']), 'cell')} by {plain(stage['run'])}"
        clocks = ", holds clocks" if stage.get("clocks") else ""
        yield f"stage {stage['name']}: {stage['kind']}, {cells}{reads}{plain(gates)}{clocks}"
        yield from (f"  {line}".rstrip() for line in _cells(stage["cells"], _leaves(content["config"])))
    yield ""
    for estimand in content["estimands"]:
        args = "".join(f", {plain(k)}={_value(v)}" for k, v in estimand.get("args", {}).items())
        yield f"estimand {estimand['name']}: {plain(estimand['what'])} ({plain(estimand['compute'])}{args})"
    for gate in content["gates"]:
        why = f" ({plain(gate['why'])})" if gate["why"] else ""
        asked = f"{gate['comparison']} {canonical.number(gate['threshold'])}"
        yield f"gate {gate['name']}: {gate['estimand']} {asked}, {SCOPES[gate['scope']]}{why}"
    for rule in protocol.rules:
        says = f" ({plain(rule.says)})" if rule.says else ""
        yield f"label {plain(rule.label)}{says}: {plain(condition(rule))}"
    yield ""
    yield f"protocol sha256 {protocol.digest}"


def condition(rule: Rule) -> str:
    """When a rule decides, in words."""
    when = [f"{name} passed" for name in rule.passed] + [f"{name} failed" for name in rule.failed]
    return " and ".join(when + [f"stage {name} was not run" for name in rule.not_run]) or "otherwise"


def _cells(cells: Sequence[Mapping[str, Json]], config_of_scale: Mapping[str, str]) -> Iterator[str]:
    """Cells with their configs: first what all of them share, then a table of what differs."""
    flat = {cell["name"]: _leaves(cell["config"]) for cell in cells}
    keys = list(dict.fromkeys(key for config in flat.values() for key in config))
    shared = [key for key in keys if len({config.get(key) for config in flat.values()}) == 1]
    first = flat[cells[0]["name"]]
    known = [key for key in shared if config_of_scale.get(key) == first[key]]
    yield from _packed("as in the config: ", _collapsed(known, config_of_scale))
    yield from _packed(
        "all  " if len(cells) > 1 else "", [f"{k}={first[k]}" for k in shared if k not in known]
    )
    columns = [key for key in keys if key not in shared]
    rows = [[name, *(config.get(key, "-") for key in columns)] for name, config in flat.items()]
    table = [["cell", *columns], *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns) + 1)]
    if columns and sum(widths) + 2 * len(columns) <= TABLE and len(cells) > 1:
        for row in table:
            yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        return
    for name, config in flat.items():
        yield from _packed(f"{name}  ", [f"{k}={config[k]}" for k in columns if k in config] or [""])


def _config(config: Mapping[str, Json]) -> list[str]:
    """What a scale says; what all of several parts say alike once, with a star in their place."""
    parts = [plain(key) for key, value in config.items() if isinstance(value, Mapping) and value]
    said: dict[tuple[str, str], int] = {}
    leaves = _leaves(config)
    for key, value in leaves.items():
        part, _, rest = key.partition(".")
        if part in parts:
            said[rest, value] = said.get((rest, value), 0) + 1
    common = [pair for pair, count in said.items() if count == len(parts) > 1]
    own = {k: v for k, v in leaves.items() if (k.partition(".")[2], v) not in common}
    return [f"*.{rest}={value}" for rest, value in common] + [f"{k}={v}" for k, v in own.items()]


def _packed(start: str, items: Sequence[str]) -> Iterator[str]:
    """Items side by side, as many as fit on a line."""
    line = start
    for i, item in enumerate(items):
        if i and len(line) + len(item) > WIDTH:
            yield line.rstrip()
            line = " " * len(start)
        line += f"{item}  "
    if items:
        yield line.rstrip()


def _collapsed(keys: Sequence[str], config: Mapping[str, str]) -> list[str]:
    """``model.*`` for all that the config says of the model."""
    parts: dict[str, list[str]] = {}
    for key in keys:
        parts.setdefault(key.partition(".")[0], []).append(key)
    whole = {part: [key for key in config if key.partition(".")[0] == part] for part in parts}
    said: list[str] = []
    for part, found in parts.items():
        missing = [key for key in whole[part] if key not in found]
        if found == [part] or len(missing) >= len(found):
            said += found
        else:
            said.append(f"{part}.*" + (f" without {', '.join(missing)}" if missing else ""))
    return said


def _leaves(config: Mapping[str, Json], above: str = "") -> dict[str, str]:
    """Nested mappings as dotted names, so that what differs inside one is all that is shown of it."""
    found: dict[str, str] = {}
    for key, value in config.items():
        name = f"{above}{plain(key)}"
        if isinstance(value, Mapping) and value:
            found |= _leaves(value, f"{name}.")
        else:
            found[name] = _value(value)
    return found


def _value(value: Json) -> str:
    """Text without its quotation marks, where it cannot be taken for something else."""
    if isinstance(value, str) and _WORD.fullmatch(value) and value not in ("true", "false", "null"):
        return value
    return plain(canonical.dumps(value).decode())
