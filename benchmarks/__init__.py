"""What is measured, against which peers, with one command each."""
