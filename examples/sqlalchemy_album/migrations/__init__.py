"""The album's own history; that of the queue is beside it, in the queue's schema."""
