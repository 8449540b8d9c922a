"""Which workers a workload needs: bounds in closed form, then simulation of the candidates."""
