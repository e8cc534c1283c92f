"""The white space that constrained JSON may have. Imports nothing: forks import it."""

# Between JSON tokens: bounded, so that a model cannot emit it forever.
WHITESPACE = r"\n? {0,32}"
