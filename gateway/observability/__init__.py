"""What is told of requests: metrics, traces, log lines, history."""
