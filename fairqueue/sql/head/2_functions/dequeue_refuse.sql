-- Says what is wrong with the arguments of a dequeue, or with its transaction.
--
-- Called by message_dequeue; takes no lock. Returns nothing: it raises.
CREATE FUNCTION dequeue_refuse(queue text, max_messages integer, lease_seconds double precision, worker text) RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF queue IS NULL OR char_length(queue) NOT BETWEEN 1 AND 255 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('queue must have 1 to 255 characters, not %s',
            coalesce(char_length(queue)::text, 'null'));
    ELSIF max_messages IS NULL OR max_messages NOT BETWEEN 1 AND 10000 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('max_messages must be 1 to 10000, not %s',
            coalesce(max_messages::text, 'null'));
    ELSIF char_length(worker) > 255 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('worker must have at most 255 characters, not %s',
            char_length(worker));
    END IF;
    PERFORM check_seconds('lease_seconds', lease_seconds, 0.001);
    RAISE active_sql_transaction USING
        MESSAGE = format('message_dequeue needs READ COMMITTED, this transaction is %s',
            upper(current_setting('transaction_isolation'))),
        HINT = 'Dequeue in a short transaction of its own.';
END
$$;
