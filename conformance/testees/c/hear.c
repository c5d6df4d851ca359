/* Frames in: what is read, what is refused and how that is answered, what is asked again; from errors.md, session.md and zeromq.md. Included by transfers.c. */
#include "session.c"

static void act(Session *session, int layout, const kvp_value *map) {
    kvp_value request = request_of(map);
    Text json = {0};
    switch (layout) {
        case KVP_WELCOME: welcome(session, map); break;
        case KVP_DESCRIPTION: description(session, map); break;
        case KVP_REGISTERED: registered_by(session, map); break;
        case KVP_PONG: answered(session, &request, KVP_PING); break;
        case KVP_PING:
            form(&json, "{\"session\": \"%llu\", \"request\": \"%llu\"}", (unsigned long long)session->id, (unsigned long long)request.number);
            notice(session, KVP_PONG, json.text);
            free(json.text);
            break;
        case KVP_GOODBYE: end_session(session, "PEER_LOST", false); break;
        case KVP_REFUSED: case KVP_ERROR: {
            const char *name = kvp_value_name(KVP_ENUM_ERROR_CODE, kvp_number(map, KVP_ERROR_CODE));
            bool about_request = request.kind && (answered(session, &request, KVP_HELLO) || answered(session, &request, KVP_DESCRIBE) || answered(session, &request, KVP_REGISTER));
            bool revoked = name && ((!strcmp(name, "NOT_ALLOWED") && !request.kind) || !strcmp(name, "UNKNOWN_SESSION") || !strcmp(name, "SUPERSEDED"));
            if (about_request || revoked) {
                if (about_request) session->source->failed = name ? name : "INTERNAL";
                end_session(session, name && strcmp(name, "UNKNOWN_SESSION") ? name : "PEER_LOST", about_request);
            } else if (request.kind) answered_by_error(session, request.number, name ? name : "INTERNAL");
            break;
        }
        default:
            if (!hear_transfer(session, layout, map)) deny("UNEXPECTED_MESSAGE", "", "a message with a row for this state", kvp_layout_name(layout));
    }
}
static void prove_former(const Session *session, uint64_t id, int layout, const kvp_value *map) { /* about a session of before, over the connection of another (KVP-SES-OTHER) */
    jmp_buf here, *outer = refused;
    refused = &here;
    if (!setjmp(here))
        for (Session *each = gone; each; each = each->next)
            if (each->source == session->source && each->id == id) hear_transfer(each, layout, map);
    refused = outer;
}
static void hear(Session *session, const uint8_t *frame, size_t size) {
    static const kvp_value *map; /* of a frame that could be read */
    Block *outer_blocks = blocks;
    jmp_buf here, *outer = refused;
    blocks = NULL;
    refused = &here;
    map = NULL;
    inside = "";
    mine_text = "what kvproto 1.0 says";
    yours_text = "what came";
    session->heard = now();
    if (!setjmp(here)) {
        kvp_message *message;
        check(kvp_decode(frame, size, &TURN, &message, &refusal));
        map = kvp_root(message);
        kvp_value id = *kvp_field(map, KVP_DONE_SESSION);
        int kind = (int)map->layout;
        bool opening = kind == KVP_WELCOME || kind == KVP_REFUSED || (kind == KVP_ERROR && !kvp_field(map, KVP_ERROR_SESSION)->kind), mine = id.kind == KVP_KIND_UINT && id.number == session->id && session->id;
        if (!opening && !mine && (kind == KVP_DONE || kind == KVP_DRAINED)) prove_former(session, id.number, kind, map);
        if (opening || mine) act(session, kind, map);
        else if (session->id) deny("UNKNOWN_SESSION", "session", "this session", "another");
    } else {
        refused = &here;
        kvp_value id, request;
        int kind = kvp_frame_ids(frame, size, &id, &request);
        begin_path();
        if (kind != KVP_ERROR && session->state != CLOSED && (map || kind < 0 || is_request(kind))) say_error(session, &id, &request, kind < 0 ? 0 : (unsigned)kind);
        if (map && (kind == KVP_WELCOME || kind == KVP_DESCRIPTION || kind == KVP_REGISTERED)) { /* nothing can come of this session */
            session->source->failed = strcmp(code, "SUPERSEDED") ? code_named(code) : NULL;
            end_session(session, code_named(code), true);
        } else if (map) refused_transfer(session, kind, map);
    }
    refused = outer;
    give_back();
    blocks = outer_blocks;
}
static void receive(Session *session) { /* what has come over one connection, a bounded number of frames (KVP-NET-TURN) */
    for (int n = 0; n < 16; n++) {
        zmq_msg_t part;
        zmq_msg_init(&part);
        if (zmq_msg_recv(&part, session->socket, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(&part);
            return;
        }
        bool alone = !zmq_msg_more(&part);
        if (alone) hear(session, zmq_msg_data(&part), zmq_msg_size(&part));
        zmq_msg_close(&part);
        while (!alone) { /* KVP-NET-ONE */
            zmq_msg_init(&part);
            zmq_msg_recv(&part, session->socket, ZMQ_DONTWAIT);
            alone = !zmq_msg_more(&part);
            zmq_msg_close(&part);
        }
    }
}
static void on_time(Session *session) {
    double time = now();
    bool pinged = false;
    for (Request *each = session->requests; each; each = each->next) {
        pinged |= each->kind == KVP_PING;
        if (time < each->again) continue;
        each->again = time + RESEND;
        if (time >= each->until && each->kind != KVP_ABORT && session->state != CLOSED) {
            end_session(session, "PEER_LOST", true);
            return;
        }
        send_frame(session, &each->frame);
    }
    if (session->state != CLOSED && session->id && !pinged && time > session->heard + SILENCE) ask(session, KVP_PING, 0, "");
}
