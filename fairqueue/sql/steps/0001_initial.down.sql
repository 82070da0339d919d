-- Back from step 1: removes everything that it created, with the messages.
DO $$
DECLARE
    v_name text;
BEGIN
    FOR v_name IN SELECT s.name FROM stage s LOOP
        EXECUTE format('DROP TABLE IF EXISTS %I.%I', current_schema(), v_name);
    END LOOP;
END
$$;
-- They take or return a row of rotation or queue, or the type.
DROP FUNCTION message_dequeue, scheduler_serve, scheduler_serve_heads, scheduler_serve_plan, scheduler_serve_shares;
DROP FUNCTION scheduler_limit, scheduler_settle, signal_policy;
DROP TYPE leased_message;
DO $$
BEGIN
    FOR n IN 1..64 LOOP
        EXECUTE format('DROP SEQUENCE %I', 'tickets_' || n);
    END LOOP;
END
$$;
DROP TABLE channel, dead_message, dropped, feed, history, lane, load, message, missed, plan, queue, rotation, signal, stage,
    tickets;
DROP FUNCTION channel_set,
    channel_surplus,
    check_on_conflict,
    check_pause,
    check_seconds,
    clock,
    dequeue_refuse,
    feed_forget,
    feed_horizon,
    feed_move,
    history_add,
    history_digest,
    history_drop,
    history_maintain,
    history_release,
    is_leased,
    lane_due,
    lane_released,
    lane_room,
    lane_step,
    lease_list,
    lease_refuse,
    lease_results,
    load_claim,
    load_count,
    load_enter,
    message_arrive,
    message_cancel,
    message_complete,
    message_create,
    message_create_many,
    message_defer,
    message_edit,
    message_ending,
    message_enter,
    message_fail,
    message_finish,
    message_heartbeat,
    message_redrive,
    message_refuse,
    message_valid,
    pause_begin,
    paused_until,
    plan_after,
    plan_most,
    queue_check,
    queue_due,
    queue_key,
    queue_listen,
    queue_notify,
    queue_repair,
    queue_set,
    queue_unlisten,
    queue_wake,
    retry_delay,
    rotation_era,
    scheduler_activate,
    scheduler_bury,
    scheduler_extend,
    scheduler_fold,
    scheduler_plan,
    scheduler_plan_heads,
    scheduler_plan_write,
    scheduler_planned,
    scheduler_rebuild,
    scheduler_reclaim,
    scheduler_recount,
    scheduler_sweep,
    scheduler_tickets,
    scheduler_tidy,
    scheduler_told,
    scheduler_turn,
    scheduler_under_way,
    scheduler_unplan,
    scheduler_wake,
    schema_serves,
    schema_version,
    signal_channel,
    signal_freed,
    signal_moved,
    signal_queue,
    signal_truncated,
    stage_clean,
    stage_create,
    stage_drop,
    table_close,
    unix_ms;
