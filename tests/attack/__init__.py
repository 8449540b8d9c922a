"""What an attacker tried on Tandem, as a program: `make attack`."""
