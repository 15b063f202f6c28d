"""The studies that come with halfulp, one short module each; ``study/registered.tsv`` lists them by name."""
