-- A search for the text of an error reads only the issues that have one. A claim and its renewals do not change the column.
CREATE INDEX idx_issues_error ON issues (id) WHERE last_error IS NOT NULL;

-- A page of the replies and events that are not delivered reads only those, in the order of their ids.
CREATE INDEX idx_outbox_open ON outbox (id) WHERE status IN ('waiting', 'pending', 'taken');
