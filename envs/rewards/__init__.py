"""Rewards by name: `reward.type`."""
