"""The page, the figures and the live view. Reads files only; decides nothing."""
