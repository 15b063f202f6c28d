"""The pages and figures that set closed studies beside the paper; no number depends on anything here."""
