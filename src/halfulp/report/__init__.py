"""What a person sees: the page, the figures, the live view. Reads files only; decides nothing."""
