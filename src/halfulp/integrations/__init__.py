"""Audits inside other people's trainers and dashboards. Nothing is imported before it is asked for.

* :mod:`halfulp.integrations.huggingface`: a callback for ``transformers.Trainer``;
* :mod:`halfulp.integrations.lightning`: a callback for Lightning's ``Trainer``;
* :mod:`halfulp.integrations.accelerate`: a listener for ``Audit`` that logs to an accelerator's trackers;
* :mod:`halfulp.integrations.tensorboard` and :mod:`halfulp.integrations.wandb`: listeners for ``Audit``.
"""
