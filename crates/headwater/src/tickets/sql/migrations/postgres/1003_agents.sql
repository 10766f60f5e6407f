-- The name of the agent who wrote a message; NULL if it is unknown, and for other authors.
ALTER TABLE ticket_messages ADD COLUMN agent text;
