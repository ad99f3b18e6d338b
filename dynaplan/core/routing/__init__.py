"""Which worker gets a request, and where its prompt is prefilled."""
