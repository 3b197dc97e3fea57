"""The contract: messages and services in protobuf, and the code generated from it."""
