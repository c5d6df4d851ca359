/* The JSON form (json.md): text to a tree, the tree to values, and values to text. */

/* ---- text to a tree; what is no JSON is BAD_TYPE at the empty path ---- */

enum { J_NULL, J_BOOL, J_NUMBER, J_STRING, J_LIST, J_OBJECT };
enum { JSON_DEPTH = 64 };
typedef struct Json { int kind; bool truth, broken; const char *text; size_t size, count, key_size; struct Json *items, *next; const char *key; } Json; /* items are linked by next; broken: half a surrogate pair is in it */
typedef struct { const char *at, *end; } Reading;

static char peek(const Reading *r) { return r->at < r->end ? *r->at : 0; }
static void blank(Reading *r) {
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t' || *r->at == '\r' || *r->at == '\n')) r->at++;
}
static void expect(Work *w, Reading *r, char c) {
    if (peek(r) != c || r->at == r->end) refuse(w, KVP_E_BAD_TYPE, NULL);
    r->at++;
}
static unsigned hex4(Work *w, Reading *r) {
    unsigned number = 0;
    for (int i = 0; i < 4; i++) {
        char c = peek(r);
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0) refuse(w, KVP_E_BAD_TYPE, NULL);
        number = number << 4 | (unsigned)digit;
        r->at++;
    }
    return number;
}
static char *put_rune(char *to, unsigned rune) {
    if (rune < 0x80) {
        *to++ = (char)rune;
        return to;
    }
    int more = rune < 0x800 ? 1 : rune < 0x10000 ? 2 : 3;
    *to++ = (char)((more == 1 ? 0xc0 : more == 2 ? 0xe0 : 0xf0) | rune >> 6 * more);
    while (more--) *to++ = (char)(0x80 | (rune >> 6 * more & 0x3f));
    return to;
}
static char *escaped(Work *w, Reading *r, char *to) { /* what follows a backslash */
    static const char from[] = "\"\\/nrtbf", into[] = "\"\\/\n\r\t\b\f";
    char c = peek(r);
    const char *simple = c ? strchr(from, c) : NULL;
    if (!simple && c != 'u') refuse(w, KVP_E_BAD_TYPE, NULL);
    r->at++;
    if (simple) {
        *to = into[simple - from];
        return to + 1;
    }
    unsigned rune = hex4(w, r);
    if (rune >> 10 == 0x36 && r->end - r->at >= 6 && r->at[0] == '\\' && r->at[1] == 'u') {
        Reading other = {r->at + 2, r->end};
        unsigned low = hex4(w, &other);
        if (low >> 10 == 0x37) {
            rune = 0x10000 + ((rune & 0x3ff) << 10) + (low & 0x3ff);
            r->at = other.at;
        }
    }
    return put_rune(to, rune); /* half a pair becomes bytes that are no UTF-8 */
}
static const char *string_here(Work *w, Reading *r, size_t *size) {
    expect(w, r, '"');
    const char *last = r->at;
    while (last < r->end && *last != '"') last += *last == '\\' ? 2 : 1;
    if (last >= r->end) refuse(w, KVP_E_BAD_TYPE, NULL);
    char *text = room_for(w, (size_t)(last - r->at) + 1, 1), *to = text; /* no escape is shorter than what it stands for */
    while (peek(r) != '"' || r->at == r->end) {
        char c = *r->at++;
        if ((unsigned char)c < 0x20) refuse(w, KVP_E_BAD_TYPE, NULL);
        if (c == '\\') to = escaped(w, r, to);
        else *to++ = c;
    }
    r->at++;
    *to = 0;
    *size = (size_t)(to - text);
    return text;
}
static bool is_number(const char *text, size_t size) { /* as JSON has it */
    size_t i = size && text[0] == '-', digits = i;
    while (i < size && text[i] >= '0' && text[i] <= '9') i++;
    if (i == digits || (text[digits] == '0' && i > digits + 1)) return false;
    if (i < size && text[i] == '.') {
        size_t point = ++i;
        while (i < size && text[i] >= '0' && text[i] <= '9') i++;
        if (i == point) return false;
    }
    if (i < size && (text[i] == 'e' || text[i] == 'E')) {
        i++;
        if (i < size && (text[i] == '+' || text[i] == '-')) i++;
        size_t exponent = i;
        while (i < size && text[i] >= '0' && text[i] <= '9') i++;
        if (i == exponent) return false;
    }
    return i == size;
}
static void word_here(Work *w, Reading *r, Json *json) {
    const char *from = r->at;
    while (r->at < r->end && !strchr(",]}: \t\r\n", *r->at)) r->at++;
    json->text = from;
    json->size = (size_t)(r->at - from);
    bool yes = json->size == 4 && !memcmp(from, "true", 4), no = json->size == 5 && !memcmp(from, "false", 5), null = json->size == 4 && !memcmp(from, "null", 4);
    if (!yes && !no && !null && !is_number(from, json->size)) refuse(w, KVP_E_BAD_TYPE, NULL);
    json->kind = null ? J_NULL : yes || no ? J_BOOL : J_NUMBER;
    json->truth = yes;
}
static Json *json_here(Work *w, Reading *r, int depth) {
    if (depth > JSON_DEPTH) refuse(w, KVP_E_BAD_TYPE, NULL);
    Json *json = get(w, 1, sizeof *json);
    blank(r);
    if (peek(r) == '"') {
        json->kind = J_STRING;
        json->text = string_here(w, r, &json->size);
    } else if (peek(r) == '[' || peek(r) == '{') {
        bool object = *r->at++ == '{';
        char end = object ? '}' : ']';
        json->kind = object ? J_OBJECT : J_LIST;
        Json **last = &json->items;
        for (blank(r); peek(r) != end; blank(r)) {
            if (json->count) expect(w, r, ',');
            blank(r);
            size_t size = 0;
            const char *key = object ? string_here(w, r, &size) : NULL;
            blank(r);
            if (object) expect(w, r, ':');
            *last = json_here(w, r, depth + 1);
            (*last)->key = key;
            (*last)->key_size = size;
            last = &(*last)->next;
            json->count++;
        }
        r->at++;
    } else word_here(w, r, json);
    blank(r);
    return json;
}
static Json *json_of(Work *w, const char *text, size_t size) {
    Reading r = {text, text + size};
    Json *json = json_here(w, &r, 1);
    if (r.at != r.end) refuse(w, KVP_E_BAD_TYPE, NULL);
    return json;
}
static bool is_key(const Json *json, const char *name) { return json->key_size == strlen(name) && !memcmp(json->key, name, json->key_size); }

/* ---- the tree to values ---- */

static bool read_digits(const char *text, size_t size, uint64_t *number) { /* false of more than 64 bits */
    *number = 0;
    for (size_t i = 0; i < size; i++) {
        uint64_t digit = (uint64_t)(text[i] - '0');
        if (*number > (UINT64_MAX - digit) / 10) return false;
        *number = *number * 10 + digit;
    }
    return true;
}
static uint64_t integer(Work *w, const Json *json, const Path *path) {
    uint64_t number;
    bool digits = json->size && (json->kind == J_STRING || json->kind == J_NUMBER) && (json->size == 1 || *json->text != '0');
    for (size_t i = 0; digits && i < json->size; i++) digits = json->text[i] >= '0' && json->text[i] <= '9';
    if (!digits) refuse(w, KVP_E_BAD_TYPE, path);
    bool fits = read_digits(json->text, json->size, &number);
    if (json->kind == J_NUMBER && (!fits || number >= UINT64_C(1) << 53)) refuse(w, KVP_E_BAD_TYPE, path);
    if (!fits) refuse(w, KVP_E_OUT_OF_RANGE, path);
    return number;
}
static kvp_value taken_map(Work *w, const Layout *layout, const Json *json, const Path *path);
static kvp_value taken_enum(Work *w, const Type *type, const Json *json, const Path *path) {
    const Enum *known = &ENUMS[type->ref];
    kvp_value value = {.kind = ENUM};
    for (int i = 0; json->kind == J_STRING && i < known->count; i++) {
        value.number = known->values[i].value;
        if (strlen(known->values[i].name) == json->size && !memcmp(json->text, known->values[i].name, json->size)) return value;
    }
    if (json->kind == J_STRING) refuse(w, KVP_E_UNKNOWN_ENUM_VALUE, path);
    if (json->kind != J_OBJECT || json->count != 1 || !is_key(json->items, "unknown")) refuse(w, KVP_E_BAD_TYPE, path);
    value.number = integer(w, json->items, path);
    within(w, type, value.number, path);
    if (!known->open || name_of(known, value.number)) refuse(w, KVP_E_UNKNOWN_ENUM_VALUE, path);
    return value;
}
static kvp_value taken(Work *w, const Type *type, const Json *json, const Path *path);
static kvp_value taken_list(Work *w, const Type *type, const Json *json, const Path *path) { /* or array */
    if (json->kind != J_LIST) refuse(w, KVP_E_BAD_TYPE, path);
    kvp_value list = {.kind = (uint32_t)type->kind, .count = json->count};
    bool array = type->kind == ARRAY;
    kvp_value *items = array ? NULL : room_for(w, list.count, sizeof *items);
    uint64_t *numbers = array ? room_for(w, list.count, sizeof *numbers) : NULL;
    size_t i = 0;
    for (const Json *each = json->items; each; each = each->next, i++) {
        kvp_value item = taken(w, type->of, each, &(Path){path, NULL, i});
        if (array) numbers[i] = item.number;
        else items[i] = item;
    }
    list.items = items;
    list.numbers = numbers;
    sized(w, type, list.count, path);
    return list;
}
static kvp_value taken_bytes(Work *w, const Type *type, const Json *json, const Path *path) {
    uint8_t *bytes = room_for(w, json->size / 2 + 1, 1);
    bool digits = json->size % 2 == 0;
    for (size_t i = 0; i < json->size && digits; i++) {
        char c = json->text[i];
        digits = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
        uint8_t digit = (uint8_t)(c <= '9' ? c - '0' : c - 'a' + 10);
        bytes[i / 2] = (uint8_t)(i % 2 ? bytes[i / 2] | digit : digit << 4);
    }
    if (!digits) refuse(w, KVP_E_BAD_TYPE, path);
    sized(w, type, json->size / 2, path);
    return (kvp_value){.kind = BYTES, .bytes = (char *)bytes, .count = json->size / 2};
}
static kvp_value taken(Work *w, const Type *type, const Json *json, const Path *path) {
    kvp_value value = {.kind = (uint32_t)type->kind};
    switch (type->kind) {
        case MAP: return taken_map(w, &LAYOUTS[type->ref], json, path);
        case ENUM: return taken_enum(w, type, json, path);
        case LIST:
        case ARRAY: return taken_list(w, type, json, path);
        case UINT:
            value.number = integer(w, json, path);
            within(w, type, value.number, path);
            return value;
        case BOOL:
            if (json->kind != J_BOOL) refuse(w, KVP_E_BAD_TYPE, path);
            value.number = json->truth;
            return value;
        default:
            if (json->kind != J_STRING) refuse(w, KVP_E_BAD_TYPE, path);
    }
    if (type->kind == BYTES) return taken_bytes(w, type, json, path);
    if (!is_utf8((const uint8_t *)json->text, json->size)) refuse(w, KVP_E_BAD_TEXT, path);
    value.bytes = json->text;
    value.count = json->size;
    sized(w, type, value.count, path);
    return value;
}
static kvp_value taken_map(Work *w, const Layout *layout, const Json *json, const Path *path) {
    if (json->kind != J_OBJECT) refuse(w, KVP_E_BAD_TYPE, path);
    kvp_value *fields, map = empty_map(w, layout, &fields);
    const Json **of = get(w, (size_t)layout->count, sizeof *of);
    for (const Json *each = json->items; each; each = each->next) {
        int i = 0;
        while (i < layout->count && !is_key(each, layout->fields[i].name)) i++;
        if (i < layout->count && !of[i]) of[i] = each;
        if (i == layout->count && (each->key_size < 2 || memcmp(each->key, "x_", 2))) refuse(w, KVP_E_UNKNOWN_FIELD, &(Path){path, each->key, 0});
    }
    for (int i = 0; i < layout->count; i++) {
        Path here = {path, layout->fields[i].name, 0};
        if (of[i]) fields[i] = taken(w, &layout->fields[i].type, of[i], &here);
        else if (layout->fields[i].required) refuse(w, KVP_E_MISSING_FIELD, &here);
    }
    check_rules(w, layout, &map, path);
    return map;
}

/* ---- values to text ---- */

static void say(Out *out, const char *words) { put_bytes(out, words, strlen(words)); }
static void say_text(Out *out, const char *bytes, size_t size) {
    say(out, "\"");
    for (size_t i = 0; i < size; i++) {
        char escape[8];
        unsigned char c = (unsigned char)bytes[i];
        if (c == '"' || c == '\\' || c < 0x20) {
            snprintf(escape, sizeof escape, c < 0x20 ? "\\u%04x" : "\\%c", c);
            say(out, escape);
        } else put_bytes(out, bytes + i, 1);
    }
    say(out, "\"");
}
static void say_number(Out *out, uint64_t number) {
    char text[32];
    snprintf(text, sizeof text, "\"%llu\"", (unsigned long long)number);
    say(out, text);
}
static void say_hex(Out *out, const char *bytes, size_t size) {
    static const char digits[] = "0123456789abcdef";
    say(out, "\"");
    for (size_t i = 0; i < size; i++) put_bytes(out, (char[2]){digits[(uint8_t)bytes[i] >> 4], digits[bytes[i] & 15]}, 2);
    say(out, "\"");
}
static void say_value(Out *out, const Type *type, const kvp_value *value);
static void say_map(Out *out, const Layout *layout, const kvp_value *map) {
    say(out, "{");
    for (int i = 0, n = 0; i < layout->count; i++) {
        if (!map->items[i].kind) continue;
        say(out, n++ ? ", \"" : "\"");
        say(out, layout->fields[i].name);
        say(out, "\": ");
        say_value(out, &layout->fields[i].type, &map->items[i]);
    }
    say(out, "}");
}
static void say_value(Out *out, const Type *type, const kvp_value *value) {
    const char *name = type->kind == ENUM ? name_of(&ENUMS[type->ref], value->number) : NULL;
    switch (type->kind) {
        case MAP: say_map(out, &LAYOUTS[type->ref], value); return;
        case BOOL: say(out, value->number ? "true" : "false"); return;
        case TEXT: say_text(out, value->bytes, value->count); return;
        case BYTES: say_hex(out, value->bytes, value->count); return;
        case LIST:
        case ARRAY:
            say(out, "[");
            for (size_t i = 0; i < value->count; i++) {
                if (i) say(out, ", ");
                if (type->kind == LIST) say_value(out, type->of, &value->items[i]);
                else say_number(out, value->numbers[i]);
            }
            say(out, "]");
            return;
        case ENUM:
            if (name) say_text(out, name, strlen(name));
            else {
                say(out, "{\"unknown\": ");
                say_number(out, value->number);
                say(out, "}");
            }
            return;
        default: say_number(out, value->number);
    }
}
