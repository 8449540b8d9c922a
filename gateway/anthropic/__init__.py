"""The spelling of Anthropic's Messages API: its requests become those of chats, and answers its messages."""
