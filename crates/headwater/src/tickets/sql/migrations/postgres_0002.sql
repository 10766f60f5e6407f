-- What an answer took, as JSON: events, tokens_in, tokens_out, cost. Unknown for messages of people, and for those of before.
ALTER TABLE ticket_messages ADD COLUMN run text;
