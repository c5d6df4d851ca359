/* What the two sides of a session have in common: who this engine is, frames out, requests that are sent again, the ids of a frame that cannot be read; from session.md, errors.md,
 * registration.md and transfers.md. Included by session.c and serve.c, which say what is left open here. */
#include "pool.c"
#include <errno.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <zmq.h>

enum { IDLE, GREETED, OPEN, DESCRIBING, DESCRIBED, REGISTERING, READY, CLOSED };
static const double RESEND = 2, PATIENCE = 30, TICKET_WAIT = 10, SILENCE = 5; /* seconds */

typedef struct Session Session;
typedef struct Request { struct Request *next; uint64_t id, sequence; int kind; Text frame; double again, until; } Request;
struct Session { /* with one rank of the peer */
    Session *next;
    struct Source *source; /* of a sink's session */
    struct Sink *sink;     /* of a source's session */
    void *socket;
    int state;
    bool verify, known, writer_ended; /* known: the source's rank has said who it is */
    int writer; /* the process that writes into this sink's memory, as a descriptor; 0 where it is not watched */
    uint64_t rank, replica, id, version, sequence, next_request, max_body, max_transfers, total, counted; /* rank, replica: the peer's; version: of the peer's Description; total, counted: bytes of Data */
    Request *requests;
    Block *memory; /* of the Description and the plan */
    Side *side;
    const Node *stated; /* the peer's Description */
    uint64_t (*box)[ROW]; /* the plan */
    size_t boxes;
    char digest[32];
    double heard;
};
static void *context;
static struct { char *name; uint64_t incarnation; bool verify; Text geometry; char digest[32]; Side *side; End end; Block *memory; } me;
static const char *mine_text = "", *yours_text = "", *inside = ""; /* inside: of what an error's path begins */
static void send_frame(Session *session, const Text *frame);
static bool routed(const Session *session, size_t i); /* whether box i is of this rank pair */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}
static char *copy_of(const char *text, size_t size) {
    char *copy = calloc(1, size + 1);
    if (!copy) abort();
    memcpy(copy, text, size);
    return copy;
}
static void keep(Block **memory) { /* what was made so far outlives this turn */
    Block **last = &blocks;
    while (*last) last = &(*last)->next;
    *last = *memory;
    *memory = blocks;
    blocks = NULL;
}
static _Noreturn void deny(const char *error, const char *path, const char *mine, const char *yours) {
    mine_text = mine;
    yours_text = yours;
    refuse(error, *path ? &(Path){NULL, path, 0} : NULL);
}

static bool may_connect(const char *address) { /* ipc in a directory that others cannot enter; this sink has no keys (KVP-NET-INSECURE) */
    struct stat about;
    char folder[108];
    if (strncmp(address, "ipc://", 6) || address[6] != '/' || strlen(address + 6) >= sizeof folder) return false;
    strcpy(folder, address + 6);
    *strrchr(folder, '/') = 0;
    return !stat(*folder ? folder : "/", &about) && S_ISDIR(about.st_mode) && !(about.st_mode & 077);
}

/* ---- this host and its processes ---- */

static void this_boot(uint8_t boot[16]) {
    char digits[64] = "";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (!file || !fgets(digits, sizeof digits, file)) abort();
    fclose(file);
    int n = 0;
    for (const char *c = digits; *c && n < 32; c++)
        if (*c != '-' && *c != '\n') {
            boot[n / 2] = (uint8_t)((n % 2 ? boot[n / 2] : 0) | (*c <= '9' ? *c - '0' : *c - 'a' + 10) << (n % 2 ? 0 : 4));
            n++;
        }
}
static bool start_of(uint64_t pid, uint64_t *start) { /* field 22 of what /proc says of a process; false where it says nothing */
    char path[64], line[1024];
    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    FILE *file = fopen(path, "r");
    const char *from = file && fgets(line, sizeof line, file) ? strrchr(line, ')') : NULL;
    for (int n = 2; n < 22 && from; n++) from = strchr(from + 1, ' ');
    if (from) *start = strtoull(from, NULL, 10);
    if (file) fclose(file);
    return from;
}
static uint64_t pid_namespace(void) {
    struct stat about;
    return stat("/proc/self/ns/pid", &about) ? 0 : (uint64_t)about.st_ino;
}

/* ---- whose memory it is ---- */

static Text attestation_of(uint64_t session, int access, const char *source, uint64_t source_replica, uint64_t source_rank, const char *sink, uint64_t sink_replica, uint64_t sink_rank) { /* 32 bytes */
    const char *engines[2] = {source, sink};
    uint64_t replicas[2] = {source_replica, sink_replica}, ranks[2] = {source_rank, sink_rank};
    char digest[32];
    Text found = {0};
    made.size = 0;
    put_number(0x98, 1);
    put_uint(session);
    put_uint((uint64_t)access);
    for (int i = 0; i < 2; i++) {
        put_head(0xa0, 32, (const uint8_t[]){0xd9, 0xda, 0xdb, 0}, strlen(engines[i]));
        add(&made, engines[i], strlen(engines[i]));
        put_uint(replicas[i]);
        put_uint(ranks[i]);
    }
    sha256(made.text, made.size, digest);
    add(&found, digest, sizeof digest);
    return found;
}

/* ---- frames out ---- */

static Text frame_of(int layout, const char *fields) { /* a frame of fields in JSON form */
    Text frame = {0};
    const char *before = reading;
    reading = fields;
    Node map = taken_map(&LAYOUTS[layout], json_here(), NULL);
    put_frame(&LAYOUTS[layout], &map);
    add(&frame, made.text, made.size);
    reading = before;
    return frame;
}
static void notice(Session *session, int layout, const char *fields) { /* or a reply: sent once */
    Text frame = frame_of(layout, fields);
    send_frame(session, &frame);
    free(frame.text);
}
static void await_answer(Session *session, int layout, uint64_t id, uint64_t sequence, Text frame) { /* sent, and again until it is answered */
    Request *request = calloc(1, sizeof *request);
    if (!request) abort();
    *request = (Request){session->requests, id, sequence, layout, frame, now() + RESEND, now() + PATIENCE};
    session->requests = request;
    send_frame(session, &request->frame);
}
static uint64_t ask(Session *session, int layout, uint64_t sequence, const char *fields) { /* under a fresh id; the first field */
    Text json = {0};
    uint64_t id = session->next_request++;
    form(&json, "{");
    if (layout != L_Hello) form(&json, "\"session\": \"%llu\", ", (unsigned long long)session->id);
    form(&json, "\"request\": \"%llu\"%s}", (unsigned long long)id, fields);
    await_answer(session, layout, id, sequence, frame_of(layout, json.text));
    free(json.text);
    return id;
}
static bool answered(Session *session, const Node *request, int kind) { /* whether this answers a request that is out */
    for (Request **each = &session->requests; *each; each = &(*each)->next)
        if ((*each)->id == request->number && (*each)->kind == kind) {
            Request *found = *each;
            *each = found->next;
            free(found->frame.text);
            free(found);
            return true;
        }
    return false;
}
static void form_quoted(Text *json, const char *name, const char *text) { /* what a peer has named may hold anything */
    form(json, ", \"%s\": \"", name);
    for (const char *c = text; *c; c++) form(json, *c == '"' || *c == '\\' ? "\\%c" : (uint8_t)*c < 0x20 ? "\\u%04x" : "%c", (uint8_t)*c);
    form(json, "\"");
}
static void form_refusal(Text *json) { /* what was refused last; fields that follow others */
    form(json, ", \"code\": \"%s\"", code);
    form_quoted(json, "path", where.text);
    form_quoted(json, "mine", mine_text);
    form_quoted(json, "yours", yours_text);
}
static void say_error(Session *session, const Node *id, const Node *request, unsigned about) { /* about: a type, or 0 for a frame of none */
    Text json = {0}, refusal = {0};
    form(&json, "{");
    if (about) form(&json, "\"about\": \"%u\", ", about);
    if (id->kind) form(&json, "\"session\": \"%llu\", ", (unsigned long long)id->number);
    if (request->kind) form(&json, "\"request\": \"%llu\", ", (unsigned long long)request->number);
    form_refusal(&refusal);
    form(&json, "%s}", refusal.text + 2); /* without the comma before it */
    free(refusal.text);
    notice(session, L_Error, json.text);
    free(json.text);
}
static void drop_requests(Session *session, int but) { /* all, or all but those of one kind */
    for (Request **each = &session->requests; *each;) {
        Request *found = *each;
        if (found->kind == but) {
            each = &found->next;
            continue;
        }
        *each = found->next;
        free(found->frame.text);
        free(found);
    }
}

/* ---- frames in ---- */

static const int REQUESTS[] = {L_Hello, L_Ping, L_Describe, L_Register, L_Unregister, L_Transfer, L_Grant, L_Done, L_Failed, L_Abort, L_Offer, L_Renew};
static bool is_request(int layout) {
    for (int i = 0; i < COUNT(REQUESTS); i++)
        if (REQUESTS[i] == layout) return true;
    return false;
}
static void read_ids(const uint8_t *frame, size_t size, Node *session, Node *request) { /* of any body, as far as its first fields can be read */
    const char *error = code;
    char *path = copy_of(where.text, where.size);
    jmp_buf here, *outer = refused;
    refused = &here;
    if (!setjmp(here)) {
        data = frame + HEADER;
        at = 1;
        end = size - HEADER;
        for (uint64_t before = 0; kind_here(NULL) == UINT && before < 2;) {
            uint64_t id = head(NULL);
            if (id <= before || id > 2 || kind_here(NULL) != UINT) break;
            *(id == 1 ? session : request) = (Node){.kind = UINT, .number = head(NULL)};
            before = id;
        }
    }
    refused = outer;
    code = error;
    where.size = 0;
    add(&where, path, strlen(path));
    free(path);
}
static int kind_of(const uint8_t *frame, size_t size) { /* the layout of the message that it says to be; -1 for no message that is known (KVP-ERR-SILENT) */
    for (int i = 0; size >= HEADER && !memcmp(frame, "KVPW", 4) && i < COUNT(LAYOUTS); i++)
        if (LAYOUTS[i].type && LAYOUTS[i].type == number_of(frame + 6, 2, true)) return frame[4] == (LAYOUTS[i].frozen ? 0 : MAJOR) ? i : -1;
    return -1;
}
static void begin_path(void) { /* KVP-DSC-PATH */
    Text path = {0};
    if (!*inside) return;
    form(&path, "%s%s%s", inside, where.size && *where.text != '[' ? "." : "", where.text);
    where.size = 0;
    add(&where, path.text, path.size);
    free(path.text);
}

/* ---- what both sides state ---- */

static void form_digest(Text *text, uint64_t (*row)[ROW], size_t count) {
    char *bytes = get(count * sizeof *row + 1), digest[32];
    for (size_t i = 0; i < count * ROW; i++)
        for (int b = 0; b < 8; b++) bytes[8 * i + (size_t)b] = (char)(row[i / ROW][i % ROW] >> 8 * b);
    sha256(bytes, count * sizeof *row, digest);
    form_hex(text, digest, sizeof digest);
}
static void form_routes(Text *text, const Session *session) { /* and the plan's digest, as Register and Registered have them */
    form(text, "\"routes\": [");
    bool more = false;
    for (size_t i = 0, n; i < session->boxes; i += n) {
        for (n = 1; i + n < session->boxes && !memcmp(session->box[i], session->box[i + n], 3 * sizeof(uint64_t)); n++) {}
        if (!routed(session, i)) continue;
        form(text, "%s{\"group\": \"%llu\", \"digest\": \"", more ? ", " : "", (unsigned long long)session->box[i][2]);
        form_digest(text, session->box + i, n);
        form(text, "\"}");
        more = true;
    }
    form(text, "], \"plan\": \"");
    form_digest(text, session->box, session->boxes);
    form(text, "\"");
}
static void content_digest(char digest[32], const uint64_t *tokens, uint64_t count) { /* of a text */
    Text json = {0};
    form(&json, "{\"tokens\": [");
    for (uint64_t i = 0; i < count; i++) form(&json, "%s\"%llu\"", i ? ", " : "", (unsigned long long)tokens[i]);
    form(&json, "], \"adapter\": \"\", \"salts\": []}");
    reading = json.text;
    Node map = taken_map(&LAYOUTS[L_Content], json_here(), NULL);
    made.size = 0;
    put_map(&LAYOUTS[L_Content], &map);
    sha256(made.text, made.size, digest);
    free(json.text);
}
static void open_engine(const Json *question) { /* what this engine is from now on */
    const Json *verify = member(question, "verify"), *transport = member(question, "transport");
    if (!open_pool(member(question, "world")->text, !strcmp(transport->text, "SHM"))) deny("NO_TRANSPORT", "world", "gqa, mla, hybrid, long", "another");
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint32_t chance;
    random_bytes(&chance, sizeof chance);
    me.name = copy_of(member(question, "name")->text, member(question, "name")->size);
    me.incarnation = ((uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000) << 20 | (chance & 0xfffff);
    me.verify = !verify || verify->truth;
    Text json = {0}, columns = {0};
    form_geometry(&json);
    form_columns(&columns);
    reading = json.text;
    Node *map = get(sizeof *map);
    *map = taken_map(&LAYOUTS[L_Geometry], json_here(), NULL);
    me.side = side_of_map(map);
    made.size = 0;
    put_map(&LAYOUTS[L_Geometry], map);
    add(&me.geometry, made.text, made.size);
    sha256(me.geometry.text, me.geometry.size, me.digest);
    reading = columns.text;
    me.end = (End){.side = me.side, .mine = &me.side->ranks[0]};
    me.end.columns = taken_list(L_Columns, json_here(), &me.end.column_count);
    say("\"geometry\": \"");
    Text hex = {0};
    form_hex(&hex, me.geometry.text, me.geometry.size);
    say(hex.text);
    say("\"");
    free(hex.text);
    free(json.text);
    free(columns.text);
    keep(&me.memory);
}

/* ---- what the suite asks of a live engine ---- */

static void answer_live(const char *op, const Json *question);
static bool answer_as_engine(const char *op, const Json *question) {
    const size_t begun = out.size;
    jmp_buf here, *outer = refused;
    refused = &here;
    say("\"ok\": {");
    if (setjmp(here)) {
        out.size = begun;
        Text json = {0};
        form(&json, "\"err\": {\"code\": \"%s\", \"path\": \"%s\", \"text\": \"%s, not %s\"}", code, where.text, mine_text, yours_text);
        say(json.text);
        free(json.text);
    } else {
        answer_live(op, question);
        say("}");
    }
    refused = outer;
    return true;
}
static bool stopped;
static Text heard;
static void hear_commands(void) {
    char bytes[1 << 16];
    ssize_t size = read(0, bytes, sizeof bytes);
    if (size <= 0) stopped = true;
    else add(&heard, bytes, (size_t)size);
    for (char *line_end; !stopped && heard.size && (line_end = memchr(heard.text, '\n', heard.size));) {
        size_t length = (size_t)(line_end - heard.text) + 1;
        char *line = copy_of(heard.text, length);
        memmove(heard.text, heard.text + length, heard.size - length);
        heard.size -= length;
        stopped = !answer_line(line);
        give_back();
        free(line);
    }
}
static void free_engine(void) {
    Block *outer = blocks;
    blocks = me.memory;
    give_back();
    blocks = outer;
    free(me.name);
    free(me.geometry.text);
    for (Text *each[] = {&heard, &out, &where, &made, &moves, &maps}, **t = each; t < each + 6; t++) free((*t)->text);
}
