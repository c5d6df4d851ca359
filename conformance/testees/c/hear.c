/* Frames in: what is read, what is refused and how that is answered, what is asked again; from errors.md, session.md and zeromq.md. Included by transfers.c. */
#include "session.c"

static void act(Session *session, const Layout *layout, const Node *map) {
    Node request = layout->count > 1 && !strcmp(layout->fields[1].name, "request") ? map->items[1] : (Node){0};
    Text json = {0};
    switch ((int)(layout - LAYOUTS)) {
        case L_Welcome: welcome(session, map); break;
        case L_Description: description(session, map); break;
        case L_Registered: registered_by(session, map); break;
        case L_Pong: answered(session, &request, L_Ping); break;
        case L_Ping:
            form(&json, "{\"session\": \"%llu\", \"request\": \"%llu\"}", (unsigned long long)session->id, (unsigned long long)request.number);
            notice(session, L_Pong, json.text);
            free(json.text);
            break;
        case L_Goodbye: end_session(session, "PEER_LOST", false); break;
        case L_Refused: case L_Error: {
            const char *name = name_of(&ENUMS[E_ErrorCode], number((int)(layout - LAYOUTS), map, "code"));
            bool about_request = request.kind && (answered(session, &request, L_Hello) || answered(session, &request, L_Describe) || answered(session, &request, L_Register));
            bool revoked = name && ((!strcmp(name, "NOT_ALLOWED") && !request.kind) || !strcmp(name, "UNKNOWN_SESSION") || !strcmp(name, "SUPERSEDED"));
            if (about_request || revoked) {
                if (about_request) session->source->failed = name ? name : "INTERNAL";
                end_session(session, name && strcmp(name, "UNKNOWN_SESSION") ? name : "PEER_LOST", about_request);
            } else if (request.kind) answered_by_error(session, request.number, name ? name : "INTERNAL");
            break;
        }
        default:
            if (!hear_transfer(session, layout, map)) deny("UNEXPECTED_MESSAGE", "", "a message with a row for this state", layout->name);
    }
}
static void prove_former(const Session *session, uint64_t id, const Layout *layout, const Node *map) { /* about a session of before, over the connection of another (KVP-SES-OTHER) */
    jmp_buf here, *outer = refused;
    refused = &here;
    if (!setjmp(here))
        for (Session *each = gone; each; each = each->next)
            if (each->source == session->source && each->id == id) hear_transfer(each, layout, map);
    refused = outer;
}
static void hear(Session *session, const uint8_t *frame, size_t size) {
    static const Layout *layout;
    static Node map;
    Block *outer_blocks = blocks;
    jmp_buf here, *outer = refused;
    blocks = NULL;
    refused = &here;
    layout = NULL;
    inside = "";
    mine_text = "what kvproto 1.0 says";
    yours_text = "what came";
    session->heard = now();
    if (!setjmp(here)) {
        const Layout *found = envelope(frame, size);
        map = body(found, frame + HEADER, size - HEADER);
        layout = found;
        Node id = map.items[0];
        int kind = (int)(layout - LAYOUTS);
        bool opening = kind == L_Welcome || kind == L_Refused || (kind == L_Error && !id.kind), mine = id.kind && id.number == session->id && session->id;
        if (!opening && !mine && (kind == L_Done || kind == L_Drained)) prove_former(session, id.number, layout, &map);
        if (opening || mine) act(session, layout, &map);
        else if (session->id) deny("UNKNOWN_SESSION", "session", "this session", "another");
    } else {
        refused = &here;
        Node id = {0}, request = {0};
        int kind = kind_of(frame, size);
        begin_path();
        if (kind >= 0 && size > HEADER) read_ids(frame, size, &id, &request);
        if (kind != L_Error && session->state != CLOSED && (layout || kind < 0 || is_request(kind))) say_error(session, &id, &request, kind < 0 ? 0 : LAYOUTS[kind].type);
        if (layout && (kind == L_Welcome || kind == L_Description || kind == L_Registered)) { /* nothing can come of this session */
            session->source->failed = strcmp(code, "SUPERSEDED") ? code_named(code) : NULL;
            end_session(session, code_named(code), true);
        } else if (layout) refused_transfer(session, kind, &map);
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
        pinged |= each->kind == L_Ping;
        if (time < each->again) continue;
        each->again = time + RESEND;
        if (time >= each->until && each->kind != L_Abort && session->state != CLOSED) {
            end_session(session, "PEER_LOST", true);
            return;
        }
        send_frame(session, &each->frame);
    }
    if (session->state != CLOSED && session->id && !pinged && time > session->heard + SILENCE) ask(session, L_Ping, 0, "");
}
