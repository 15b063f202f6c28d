"""A precision contract: say what must hold of an optimizer, and have it checked while it trains.

A guard that looks once, at step 1, misses what usually goes wrong: masters that a resume dropped, an upcast
that did nothing, a counter that has stopped. :func:`require` looks at the first observed step, after every
``load_state_dict`` and every few steps from then on.
"""

from halfulp.contract.contract import Contract, ContractError, ContractWarning, require
from halfulp.contract.requirements import Terms

__all__ = ["Contract", "ContractError", "ContractWarning", "Terms", "require"]
