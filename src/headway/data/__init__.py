"""Chats and text to tokens and labels, shards, packs and batches, with an exact position."""
