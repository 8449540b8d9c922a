"""The readable decoder, the oracle of the fast ones."""
