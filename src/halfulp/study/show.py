"""A study in words, before anything runs: everything that will be sealed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from halfulp import canonical
from halfulp.study.declaration import Protocol
from halfulp.study.protocol import Json
from halfulp.text import count, plain


def lines(protocol: Protocol) -> Iterator[str]:
    """All of a protocol, a line a thing."""
    content = protocol.content
    yield f"{content['study']} ({content['scale']})"
    yield ""
    yield f"question     {plain(content['question'])}"
    yield f"units        {plain(content['units'])}"
    for claim in content["not_claimed"]:
        yield f"not claimed  {plain(claim)}"
    yield f"config       {_flat(content['config'])}"
    for name in content["data"]:
        yield f"data         {plain(name)}"
    yield f"threads      {content['threads']} a worker process"
    yield f"retries      {content['retries']}"
    for stage in content["stages"]:
        yield ""
        reads = f", reads {', '.join(stage['reads'])}" if stage["reads"] else ""
        cells = f"{count(len(stage['cells']), 'cell')} by {plain(stage['run'])}"
        yield f"stage {stage['name']}: {stage['kind']}, {cells}{reads}"
        for cell in stage["cells"]:
            yield f"  {cell['name']}  {_flat(cell['config'])}".rstrip()
    yield ""
    for estimand in content["estimands"]:
        yield f"estimand {estimand['name']}: {plain(estimand['what'])} ({plain(estimand['compute'])})"
    for gate in content["gates"]:
        why = f" ({plain(gate['why'])})" if gate["why"] else ""
        condition = f"{gate['comparison']} {canonical.number(gate['threshold'])}"
        yield f"gate {gate['name']}: {gate['estimand']} {condition}, {SCOPES[gate['scope']]}{why}"
    for rule in content["rules"]:
        when = [f"{name} passed" for name in rule["passed"]] + [f"{name} failed" for name in rule["failed"]]
        yield f"label {plain(rule['label'])}: {' and '.join(when) or 'otherwise'}"
    yield ""
    yield f"protocol sha256 {protocol.digest}"


SCOPES = {"all": "in every unit", "mean": "in the mean over units", "unit": "unit by unit"}


def _flat(config: Mapping[str, Json]) -> str:
    return "  ".join(f"{plain(key)}={plain(canonical.dumps(config[key]).decode())}" for key in config)
