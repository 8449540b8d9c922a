"""How many workers of each role there should be, from what gateways know: forecasts, decisions, and their reasons."""
