/* Messages as the caller has them: decoded, read from JSON or filled; names of numbers; byte streams; negotiation. */

struct kvp_message {
    Arena arena;
    const Layout *layout;
    kvp_value root;
    bool filled; /* by the caller, and not read */
    int wrong; /* what went wrong first while it was filled */
};
static const kvp_value ABSENT = {0};

/* ---- names ---- */

const char *kvp_version(void) { return KVP_LIBRARY_VERSION; }
const char *kvp_value_name(int enumeration, uint64_t value) { return enumeration >= 0 && enumeration < COUNT(ENUMS) ? name_of(&ENUMS[enumeration], value) : NULL; }
const char *kvp_code_name(int code) {
    return code == KVP_NO_MEMORY ? "NO_MEMORY" : code == KVP_NO_ROOM ? "NO_ROOM" : code == KVP_MISUSE ? "MISUSE" : code > 0 ? kvp_value_name(KVP_ENUM_ERROR_CODE, (uint64_t)code) : NULL;
}
bool kvp_value_named(int enumeration, const char *name, size_t size, uint64_t *value) {
    for (int i = 0; enumeration >= 0 && enumeration < COUNT(ENUMS) && i < ENUMS[enumeration].count; i++) {
        const Value *each = &ENUMS[enumeration].values[i];
        if (strlen(each->name) != size || memcmp(each->name, name, size)) continue;
        *value = each->value;
        return true;
    }
    return false;
}
int kvp_layout_named(const char *name, size_t size) {
    for (int i = 0; i < COUNT(LAYOUTS); i++)
        if (strlen(LAYOUTS[i].name) == size && !memcmp(LAYOUTS[i].name, name, size)) return (int)LAYOUTS[i].number;
    return -1;
}
const char *kvp_layout_name(int layout) {
    const Layout *found = layout < 0 ? NULL : layout_of((uint32_t)layout);
    return found ? found->name : NULL;
}
static int place_of_field(const Layout *layout, int field) { /* -1 where there is none */
    for (int i = 0; layout && i < layout->count; i++)
        if (layout->fields[i].id == (unsigned)field) return i;
    return -1;
}
const kvp_value *kvp_field(const kvp_value *map, int field) {
    int i = map && map->kind == MAP ? place_of_field(layout_of(map->layout), field) : -1;
    return i < 0 ? &ABSENT : &map->items[i];
}
uint64_t kvp_number(const kvp_value *map, int field) { return kvp_field(map, field)->number; }

/* ---- read ---- */

typedef struct { const Layout *layout; const uint8_t *bytes; const char *text; size_t size; bool list; kvp_message *made; } Asked;
static kvp_message *message_of(Work *w, const Layout *layout, kvp_value root) {
    kvp_message *message = get(w, 1, sizeof *message);
    message->layout = layout;
    message->root = root;
    message->arena = w->arena;
    return message;
}
static void decode(Work *w, void *arguments) {
    Asked *asked = arguments;
    const Layout *layout = asked->layout ? asked->layout : envelope(w, asked->bytes, asked->size);
    size_t skipped = asked->layout ? 0 : HEADER;
    kvp_value root = body(w, layout, asked->bytes + skipped, asked->size - skipped);
    asked->made = message_of(w, layout, root);
}
int kvp_decode(const void *frame, size_t size, const kvp_options *options, kvp_message **message, kvp_error *error) {
    Work w;
    Asked asked = {.bytes = size ? frame : (const uint8_t *)"", .size = size};
    int code = attempt(&w, options, error, decode, &asked);
    *message = asked.made;
    return code;
}
static int misused(kvp_error *error) {
    if (error) {
        clear(error);
        error->code = KVP_MISUSE;
    }
    return KVP_MISUSE;
}
int kvp_decode_struct(int layout, const void *bytes, size_t size, const kvp_options *options, kvp_message **message, kvp_error *error) {
    Work w;
    Asked asked = {.layout = layout < 0 ? NULL : layout_of((uint32_t)layout), .bytes = size ? bytes : (const uint8_t *)"", .size = size};
    int code = asked.layout ? attempt(&w, options, error, decode, &asked) : misused(error);
    *message = asked.made;
    return code;
}
static void from_json(Work *w, void *arguments) {
    Asked *asked = arguments;
    const Json *json = json_of(w, asked->text, asked->size);
    if (asked->list) {
        const Type of = {MAP, (int)(asked->layout - LAYOUTS), 0, 0, NULL}, type = {LIST, 0, 0, KVP_MAX_LIST, &of};
        asked->made = message_of(w, asked->layout, taken_list(w, &type, json, NULL));
        return;
    }
    kvp_value root = taken_map(w, asked->layout, json, NULL);
    Out out = {0};
    put_map(&out, asked->layout, &root);
    check_size(w, &out, asked->layout, 0);
    asked->made = message_of(w, asked->layout, root);
}
static int read_json(bool list, int layout, const char *text, size_t size, const kvp_options *options, kvp_message **message, kvp_error *error) {
    Work w;
    Asked asked = {.layout = layout < 0 ? NULL : layout_of((uint32_t)layout), .text = size ? text : "", .size = size, .list = list};
    int code = asked.layout ? attempt(&w, options, error, from_json, &asked) : misused(error);
    *message = asked.made;
    return code;
}
int kvp_from_json(int layout, const char *text, size_t size, const kvp_options *options, kvp_message **message, kvp_error *error) { return read_json(false, layout, text, size, options, message, error); }
int kvp_list_from_json(int layout, const char *text, size_t size, const kvp_options *options, kvp_message **list, kvp_error *error) { return read_json(true, layout, text, size, options, list, error); }
const kvp_value *kvp_root(const kvp_message *message) { return &message->root; }
void kvp_message_free(kvp_message *message) {
    if (message) release(&message->arena);
}
typedef struct { const uint8_t *frame; size_t size; kvp_value *ids[2]; } Ids;
static void read_ids(Work *w, void *arguments) {
    Ids *ids = arguments;
    w->data = ids->frame + HEADER;
    w->at = 1; /* behind the head of the map */
    w->end = ids->size - HEADER;
    for (uint64_t before = 0; kind_here(w, NULL) == UINT && before < 2;) {
        uint64_t id = head(w, NULL);
        if (id <= before || id > 2 || kind_here(w, NULL) != UINT) break;
        *ids->ids[id - 1] = (kvp_value){.kind = UINT, .number = head(w, NULL)};
        before = id;
    }
}
int kvp_frame_ids(const void *frame, size_t size, kvp_value *session, kvp_value *request) {
    const uint8_t *bytes = frame;
    *session = *request = ABSENT;
    const Layout *layout = size < HEADER || memcmp(bytes, "KVPW", 4) ? NULL : layout_of_type((unsigned)number_of(bytes + 6, 2, true));
    if (!layout || bytes[4] != (layout->frozen ? 0 : KVP_MAJOR)) return -1;
    Work w;
    Ids ids = {bytes, size, {session, request}};
    if (size > HEADER && !attempt(&w, NULL, NULL, read_ids, &ids)) release(&w.arena);
    return (int)layout->number;
}

/* ---- filled ---- */

kvp_message *kvp_message_new(int layout, const kvp_options *options) {
    const Layout *known = layout < 0 ? NULL : layout_of((uint32_t)layout);
    Arena arena = {.options = options_of(options)};
    kvp_message *message = known ? take_memory(&arena, sizeof *message) : NULL;
    kvp_value *fields = message ? take_memory(&arena, (size_t)known->count * sizeof *fields) : NULL;
    if (!fields) {
        release(&arena);
        return NULL;
    }
    memset(fields, 0, (size_t)known->count * sizeof *fields);
    *message = (kvp_message){.arena = arena, .layout = known, .root = {.kind = MAP, .layout = known->number, .count = (size_t)known->count, .items = fields}, .filled = true};
    return message;
}
kvp_value *kvp_fill(kvp_message *message) { return message && message->filled ? &message->root : NULL; }
static void goes_wrong(kvp_message *message, int code) {
    if (message && !message->wrong) message->wrong = code;
}
static void *kept(kvp_message *message, const void *bytes, size_t size) { /* a copy */
    void *copy = take_memory(&message->arena, size);
    if (!copy) goes_wrong(message, KVP_NO_MEMORY);
    else if (bytes && size) memcpy(copy, bytes, size);
    return copy;
}
static kvp_value *slot(kvp_message *message, kvp_value *map, int field, const Type **type) { /* the place of a field; NULL where there is none */
    const Layout *layout = message && message->filled && map && map->kind == MAP ? layout_of(map->layout) : NULL;
    int i = place_of_field(layout, field);
    if (i < 0) {
        goes_wrong(message, KVP_MISUSE);
        return NULL;
    }
    *type = &layout->fields[i].type;
    return (kvp_value *)&map->items[i];
}
void kvp_set_number(kvp_message *message, kvp_value *map, int field, uint64_t number) {
    const Type *type;
    kvp_value *place = slot(message, map, field, &type);
    if (!place) return;
    if (type->kind != UINT && type->kind != BOOL && type->kind != ENUM) goes_wrong(message, KVP_MISUSE);
    else *place = (kvp_value){.kind = (uint32_t)type->kind, .number = number};
}
void kvp_set_bytes(kvp_message *message, kvp_value *map, int field, const void *bytes, size_t size) {
    const Type *type;
    kvp_value *place = slot(message, map, field, &type);
    if (!place) return;
    const char *copy = type->kind == TEXT || type->kind == BYTES ? kept(message, bytes, size) : NULL;
    if (copy) *place = (kvp_value){.kind = (uint32_t)type->kind, .bytes = copy, .count = size};
    else goes_wrong(message, KVP_MISUSE);
}
static void set_numbers(kvp_message *message, kvp_value *map, int field, const uint64_t *wide, const uint32_t *narrower, size_t count) {
    const Type *type;
    kvp_value *place = slot(message, map, field, &type), *items = NULL;
    uint64_t *numbers = NULL;
    if (!place) return;
    if (count > KVP_MAX_ARRAY || !(type->kind == ARRAY || (type->kind == LIST && type->of->kind == ENUM))) {
        goes_wrong(message, KVP_MISUSE);
        return;
    }
    if (type->kind == ARRAY) numbers = kept(message, wide, count * sizeof *numbers);
    else items = kept(message, NULL, count * sizeof *items);
    if (!numbers && !items) return;
    for (size_t i = 0; numbers && narrower && i < count; i++) numbers[i] = narrower[i];
    for (size_t i = 0; items && i < count; i++) items[i] = (kvp_value){.kind = ENUM, .number = wide ? wide[i] : narrower[i]};
    *place = (kvp_value){.kind = (uint32_t)type->kind, .numbers = numbers, .items = items, .count = count};
}
void kvp_set_numbers(kvp_message *message, kvp_value *map, int field, const uint64_t *numbers, size_t count) { set_numbers(message, map, field, numbers, NULL, count); }
void kvp_set_numbers32(kvp_message *message, kvp_value *map, int field, const uint32_t *numbers, size_t count) { set_numbers(message, map, field, NULL, numbers, count); }
void kvp_set_texts(kvp_message *message, kvp_value *map, int field, const char *const *texts, const size_t *sizes, size_t count) {
    const Type *type;
    kvp_value *place = slot(message, map, field, &type);
    if (!place) return;
    if (count > KVP_MAX_LIST || type->kind != LIST || (type->of->kind != TEXT && type->of->kind != BYTES)) {
        goes_wrong(message, KVP_MISUSE);
        return;
    }
    kvp_value *items = kept(message, NULL, count * sizeof *items);
    for (size_t i = 0; items && i < count; i++) items[i] = (kvp_value){.kind = (uint32_t)type->of->kind, .bytes = kept(message, texts[i], sizes[i]), .count = sizes[i]};
    if (!message->wrong) *place = (kvp_value){.kind = LIST, .items = items, .count = count};
}
void kvp_set_list(kvp_message *message, kvp_value *map, int field) {
    const Type *type;
    kvp_value *place = slot(message, map, field, &type);
    if (!place) return;
    if (type->kind == LIST) *place = (kvp_value){.kind = LIST};
    else goes_wrong(message, KVP_MISUSE);
}
static bool empty(kvp_message *message, int ref, kvp_value *map) { /* a map without a field */
    const Layout *layout = &LAYOUTS[ref];
    kvp_value *fields = kept(message, NULL, (size_t)layout->count * sizeof *fields);
    if (!fields) return false;
    memset(fields, 0, (size_t)layout->count * sizeof *fields);
    *map = (kvp_value){.kind = MAP, .layout = layout->number, .count = (size_t)layout->count, .items = fields};
    return true;
}
kvp_value *kvp_set_map(kvp_message *message, kvp_value *map, int field) {
    const Type *type;
    kvp_value *place = slot(message, map, field, &type);
    if (place && type->kind == MAP) return empty(message, type->ref, place) ? place : NULL;
    goes_wrong(message, KVP_MISUSE);
    return NULL;
}
kvp_value *kvp_add_map(kvp_message *message, kvp_value *map, int field) {
    const Type *type;
    kvp_value *place = slot(message, map, field, &type), made;
    if (!place || type->kind != LIST || type->of->kind != MAP || place->count >= KVP_MAX_LIST) {
        goes_wrong(message, KVP_MISUSE);
        return NULL;
    }
    size_t count = place->count;
    kvp_value *items = (kvp_value *)place->items;
    if (!(count & (count - 1))) { /* a power of two, or none: it is full. Who has a pointer to an old place still has the fields. */
        items = kept(message, NULL, (count ? 2 * count : 1) * sizeof *items);
        if (items && count) memcpy(items, place->items, count * sizeof *items);
    }
    if (!items || !empty(message, type->of->ref, &made)) return NULL;
    items[count] = made;
    *place = (kvp_value){.kind = LIST, .items = items, .count = count + 1};
    return &items[count];
}

/* ---- written ---- */

typedef struct { const kvp_message *message; Out out; bool frame; } Written;
static void encode(Work *w, void *arguments) {
    Written *written = arguments;
    const kvp_message *message = written->message;
    if (message->wrong) refuse(w, message->wrong, NULL);
    if (message->root.kind != MAP || (written->frame && !message->layout->type)) refuse(w, KVP_MISUSE, NULL);
    Out *out = &written->out; /* what is written is whole, and may yet be refused */
    if (written->frame) put_bytes(out, (const uint8_t[HEADER]){0}, HEADER);
    put_map(out, message->layout, &message->root);
    check_map(w, message->layout, &message->root, out->beyond, NULL);
    check_size(w, out, message->layout, written->frame ? HEADER : 0);
    if (written->frame) put_header(out, message->layout);
}
static int encoded(const kvp_message *message, bool frame, void *bytes, size_t room, size_t *size, kvp_error *error) {
    Work w;
    Written written = {message, {.bytes = bytes, .room = bytes ? room : 0}, frame};
    *size = 0;
    if (!message) return misused(error);
    int code = attempt(&w, &message->arena.options, error, encode, &written);
    if (code) return code;
    release(&w.arena);
    *size = written.out.size;
    if (written.out.size <= written.out.room) return KVP_OK;
    w.error->code = KVP_NO_ROOM;
    return KVP_NO_ROOM;
}
int kvp_encode(const kvp_message *message, void *frame, size_t room, size_t *size, kvp_error *error) { return encoded(message, true, frame, room, size, error); }
int kvp_encode_struct(const kvp_message *message, void *bytes, size_t room, size_t *size, kvp_error *error) { return encoded(message, false, bytes, room, size, error); }
int kvp_to_json(const kvp_value *value, char *text, size_t room, size_t *size) {
    Out out = {.bytes = (uint8_t *)text, .room = text ? room : 0};
    const Layout *layout = value->kind == MAP ? layout_of(value->layout) : NULL;
    *size = 0;
    if (!layout) return KVP_MISUSE;
    say_map(&out, layout, value);
    *size = out.size;
    return out.size > out.room ? KVP_NO_ROOM : KVP_OK;
}

/* ---- byte streams ---- */

struct kvp_stream {
    kvp_options options;
    uint8_t *bytes;
    size_t size, room, taken; /* taken: of the front, what the next call gives up */
    uint64_t skipped; /* bytes of a body that is refused for its size, and still comes */
    bool lost;
};
kvp_stream *kvp_stream_new(const kvp_options *stated) {
    kvp_options options = options_of(stated);
    kvp_stream *stream = options.allocate(options.state, sizeof *stream);
    if (stream) *stream = (kvp_stream){.options = options};
    return stream;
}
void kvp_stream_free(kvp_stream *stream) {
    if (!stream) return;
    kvp_options options = stream->options;
    if (stream->bytes) options.release(options.state, stream->bytes);
    options.release(options.state, stream);
}
static void give_up_taken(kvp_stream *stream) {
    if (!stream->taken) return;
    stream->size -= stream->taken;
    memmove(stream->bytes, stream->bytes + stream->taken, stream->size);
    stream->taken = 0;
}
int kvp_stream_feed(kvp_stream *stream, const void *bytes, size_t size) {
    size_t passed = stream->skipped < size ? (size_t)stream->skipped : size;
    stream->skipped -= passed;
    size -= passed;
    give_up_taken(stream);
    if (stream->lost || !size) return KVP_OK;
    if (size > stream->room - stream->size) {
        if (size > stream->options.max_memory || stream->size > stream->options.max_memory - size) return KVP_NO_MEMORY;
        size_t room = stream->size + size, twice = stream->options.max_memory / 2 > room ? 2 * room : room;
        uint8_t *longer = stream->options.allocate(stream->options.state, twice);
        if (!longer) return KVP_NO_MEMORY;
        if (stream->size) memcpy(longer, stream->bytes, stream->size);
        if (stream->bytes) stream->options.release(stream->options.state, stream->bytes);
        stream->bytes = longer;
        stream->room = twice;
    }
    memcpy(stream->bytes + stream->size, (const uint8_t *)bytes + passed, size);
    stream->size += size;
    return KVP_OK;
}
bool kvp_stream_next(kvp_stream *stream, const void **frame, size_t *size) {
    give_up_taken(stream);
    size_t there = stream->size;
    if (stream->lost || !there) return false;
    const uint8_t *bytes = stream->bytes;
    *frame = bytes;
    stream->lost = memcmp(bytes, "KVPW", there < 4 ? there : 4);
    if (stream->lost) {
        *size = there < 4 ? there : 4;
        return true;
    }
    if (there < HEADER) return false;
    uint64_t length = number_of(bytes + 12, 4, true), all = HEADER + length;
    bool whole = length <= KVP_MAX_BODY;
    if (whole && there < all) return false;
    *size = whole ? (size_t)all : HEADER;
    stream->taken = there < all ? there : (size_t)all;
    stream->skipped = all - stream->taken;
    return true;
}

/* ---- negotiation (negotiation.md) ---- */

static bool among(const uint64_t *list, size_t count, uint64_t feature) {
    size_t i = 0;
    while (i < count && list[i] != feature) i++;
    return i < count;
}
typedef struct { const kvp_terms *sink, *source; uint32_t *major, *minor; uint64_t *features; size_t *count; } Terms;
static void check_needed(Work *w, const uint64_t *needed, size_t count, const uint64_t *offered, size_t offers, const char *field) {
    for (size_t i = 0; i < count; i++)
        if (!among(offered, offers, needed[i])) refuse(w, KVP_E_FEATURE_MISSING, &(Path){NULL, field, 0});
}
static void negotiate(Work *w, void *arguments) {
    Terms *terms = arguments;
    const kvp_terms *sink = terms->sink, *source = terms->source;
    const kvp_versions *mine = NULL, *yours = NULL;
    for (size_t i = 0; !yours && i < sink->version_count; i++) {
        mine = &sink->versions[i];
        for (size_t j = 0; !yours && j < source->version_count; j++) {
            const kvp_versions *each = &source->versions[j];
            if (each->major == mine->major && mine->least <= each->most && each->least <= mine->most) yours = each;
        }
    }
    if (!yours) refuse(w, KVP_E_NO_VERSION, &(Path){NULL, "versions", 0});
    check_needed(w, sink->needed, sink->needed_count, source->offered, source->offered_count, "needed");
    check_needed(w, source->needed, source->needed_count, sink->offered, sink->offered_count, "offered");
    *terms->major = mine->major;
    *terms->minor = mine->most < yours->most ? mine->most : yours->most;
    *terms->count = 0;
    for (size_t i = 0; i < sink->offered_count; i++)
        if (among(source->offered, source->offered_count, sink->offered[i])) terms->features[(*terms->count)++] = sink->offered[i];
    sort(w, terms->features, *terms->count, sizeof *terms->features, by_number, NULL);
}
int kvp_negotiate(const kvp_terms *sink, const kvp_terms *source, uint32_t *major, uint32_t *minor, uint64_t *features, size_t *count, kvp_error *error) {
    Work w;
    Terms terms = {sink, source, major, minor, features, count};
    int code = attempt(&w, NULL, error, negotiate, &terms);
    if (!code) release(&w.arena);
    return code;
}
