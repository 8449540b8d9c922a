"""The generated stubs: `inference_pb2` and `cluster_pb2` are copies of those of the server, byte for byte.

They name the same .proto files, so a process that has both gets one set of message classes and no conflict.
`wire_pb2` has the shapes of a few messages that come from other packages. `tools/protos.sh` writes and compares all.
"""
