"""The members that are connected to the head: dialled, greeted, slow, idle or missing."""
