"""Plain data of a step: sequences, plans, outcomes, guesses."""
