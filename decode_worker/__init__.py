"""Takes pages in and generates tokens by continuous batching."""
