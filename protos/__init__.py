"""The wire contract: .proto files and their generated stubs, nothing else."""
