"""Models by their name: brings the files of one from the Hugging Face hub or from S3 to a folder of this machine."""
