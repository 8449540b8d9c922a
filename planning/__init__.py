"""What a cluster should be, from the gateway's own policies.

Imports no worker; what it finds reaches a cluster only through an operator or an autoscaler's target.
"""
