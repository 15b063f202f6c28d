"""The studies that come with halfulp, one short module each; ``halfulp.paper.plugin`` lists them by name."""
