"""Everything that only the paper needs: its studies, what they train, measure and certify, and its pages.

Nothing outside this folder imports it: the command line finds `plugin` by its name. Without the
folder the library is whole, and comes without studies.

- `studies`: one short module for each study; `arms`: the training runs of decoder studies, as data.
- `models`, `tokens`: what the studies train, and on what.
- `certificates`, `trust`: intervals and proofs for forecasts; `learning`, `values`, `dominance`: other
  measures.
- `effort`: what a training run takes, for a plan.
- `panels`, `report`: figures, and the pages that set our records beside the numbers the paper prints.
"""
