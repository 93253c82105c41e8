"""How fast Semel is, beside the bare commands and beside the libraries that do something alike."""
