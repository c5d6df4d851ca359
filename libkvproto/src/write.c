/* Writing: values to bytes, in the one form that readers accept; and what no writer may write. */

typedef struct { uint8_t *bytes; size_t room, size; uint64_t values; bool beyond; } Out; /* size: what is needed, also beyond the room; values: entries of maps and elements of lists; beyond: a number of an array is too great */

static void put_bytes(Out *out, const void *bytes, size_t size) {
    if (size && out->size <= out->room && size <= out->room - out->size) memcpy(out->bytes + out->size, bytes, size);
    out->size += size;
}
static void put_number(Out *out, uint64_t number, int size) {
    uint8_t bytes[8];
    for (int i = 0; i < size; i++) bytes[i] = (uint8_t)(number >> 8 * (size - 1 - i));
    put_bytes(out, bytes, (size_t)size);
}
static void put_head(Out *out, int short_form, uint64_t below, const uint8_t *longer, uint64_t number) { /* longer: first bytes of 1, 2, 4 and 8 bytes; 0 where there is none */
    if (number < below) {
        put_number(out, (uint64_t)short_form | number, 1);
        return;
    }
    int i = 0;
    while (!longer[i] || (i < 3 && number >> (8 << i))) i++;
    put_number(out, longer[i], 1);
    put_number(out, number, 1 << i);
}
static void put_uint(Out *out, uint64_t number) { put_head(out, 0, 0x80, (const uint8_t[]){0xcc, 0xcd, 0xce, 0xcf}, number); }
#define NARROW(type)                                                           \
    for (; i + 8 <= count; i += 8) {                                           \
        type some[8];                                                          \
        for (int k = 0; k < 8; k++) some[k] = (type)numbers[i + (size_t)k];    \
        memcpy(to + i * sizeof(type), some, sizeof some);                      \
    }
static void narrow(uint8_t *to, const uint64_t *numbers, size_t count, int width) {
    size_t i = 0;
    if (is_little()) {
        if (width == 1) NARROW(uint8_t)
        else if (width == 2) NARROW(uint16_t)
        else if (width == 4) NARROW(uint32_t)
        else NARROW(uint64_t)
    }
    for (; i < count; i++)
        for (int b = 0; b < width; b++) to[i * (size_t)width + (size_t)b] = (uint8_t)(numbers[i] >> 8 * b);
}
static uint64_t all_bits(const uint64_t *numbers, size_t count) {
    uint64_t some[4] = {0};
    size_t i = 0;
    for (; i + 4 <= count; i += 4)
        for (int k = 0; k < 4; k++) some[k] |= numbers[i + (size_t)k];
    for (; i < count; i++) some[0] |= numbers[i];
    return some[0] | some[1] | some[2] | some[3];
}
static void put_array(Out *out, const Type *of, const uint64_t *numbers, size_t count) {
    uint64_t all = all_bits(numbers, count);
    int log = all >> 32 ? 3 : all >> 16 ? 2 : all >> 8 ? 1 : 0, fixed = 0;
    size_t size = count << log;
    out->beyond |= all > of->most;
    while (fixed < 5 && (size_t)1 << fixed != size) fixed++;
    if (fixed < 5) put_number(out, (uint64_t)(0xd4 + fixed), 1);
    else put_head(out, 0, 0, (const uint8_t[]){0xc7, 0xc8, 0xc9, 0}, size);
    put_number(out, (uint64_t)log + 1, 1);
    if (out->size <= out->room && size <= out->room - out->size) narrow(out->bytes + out->size, numbers, count, 1 << log);
    out->size += size;
}
static void put_map(Out *out, const Layout *layout, const kvp_value *map);
static void put(Out *out, const Type *type, const kvp_value *value) {
    switch (type->kind) {
        case MAP: put_map(out, &LAYOUTS[type->ref], value); return;
        case BOOL: put_number(out, value->number ? 0xc3 : 0xc2, 1); return;
        case TEXT: put_head(out, 0xa0, 32, (const uint8_t[]){0xd9, 0xda, 0xdb, 0}, value->count); put_bytes(out, value->bytes, value->count); return;
        case BYTES: put_head(out, 0, 0, (const uint8_t[]){0xc4, 0xc5, 0xc6, 0}, value->count); put_bytes(out, value->bytes, value->count); return;
        case LIST:
            put_head(out, 0x90, 16, (const uint8_t[]){0, 0xdc, 0xdd, 0}, value->count);
            out->values += value->count;
            for (size_t i = 0; i < value->count; i++) put(out, type->of, &value->items[i]);
            return;
        case ARRAY: put_array(out, type->of, value->numbers, value->count); return;
        default: put_uint(out, value->number);
    }
}
static void put_map(Out *out, const Layout *layout, const kvp_value *map) {
    size_t count = 0;
    for (int i = 0; i < layout->count; i++) count += map->items[i].kind != NONE;
    put_head(out, 0x80, 16, (const uint8_t[]){0, 0xde, 0xdf, 0}, count);
    out->values += count;
    for (int i = 0; i < layout->count; i++) {
        if (!map->items[i].kind) continue;
        put_uint(out, layout->fields[i].id);
        put(out, &layout->fields[i].type, &map->items[i]);
    }
}
static void put_header(Out *out, const Layout *layout) { /* in front of a body */
    if (out->size > out->room) return;
    uint8_t header[HEADER] = "KVPW";
    header[4] = layout->frozen ? 0 : KVP_MAJOR;
    header[5] = layout->frozen ? 0 : KVP_MINOR;
    for (int i = 0; i < 2; i++) header[6 + i] = (uint8_t)(layout->type >> 8 * i);
    for (int i = 0; i < 4; i++) header[12 + i] = (uint8_t)((out->size - HEADER) >> 8 * i);
    memcpy(out->bytes, header, HEADER);
}

/* ---- what may be written ---- */

static void check_size(Work *w, const Out *out, const Layout *layout, size_t header) { /* of a body, or a bare struct */
    if (out->size - header > KVP_MAX_BODY || (layout->type && out->values > KVP_MAX_VALUES)) refuse(w, KVP_E_TOO_LARGE, NULL);
}
static void sized(Work *w, const Type *type, size_t size, const Path *path) {
    if (size > limit_of(type->kind)) refuse(w, KVP_E_TOO_LARGE, path);
    within(w, type, size, path);
}
static void check_map(Work *w, const Layout *layout, const kvp_value *map, bool beyond, const Path *path);
static void check_value(Work *w, const Type *type, const kvp_value *value, bool beyond, const Path *path) { /* beyond: whether a number of an array may be too great */
    if (value->kind != (uint32_t)type->kind) refuse(w, KVP_E_BAD_TYPE, path);
    switch (type->kind) {
        case MAP: check_map(w, &LAYOUTS[type->ref], value, beyond, path); return;
        case BOOL: return;
        case TEXT:
            if (!is_utf8((const uint8_t *)value->bytes, value->count)) refuse(w, KVP_E_BAD_TEXT, path);
            sized(w, type, value->count, path);
            return;
        case BYTES: sized(w, type, value->count, path); return;
        case LIST:
            for (size_t i = 0; i < value->count; i++) check_value(w, type->of, &value->items[i], beyond, &(Path){path, NULL, i});
            sized(w, type, value->count, path);
            return;
        case ARRAY:
            if (beyond)
                for (size_t i = 0; i < value->count; i++) within(w, type->of, value->numbers[i], &(Path){path, NULL, i});
            sized(w, type, value->count, path);
            return;
        case ENUM:
            if (!ENUMS[type->ref].open && !name_of(&ENUMS[type->ref], value->number)) refuse(w, KVP_E_UNKNOWN_ENUM_VALUE, path);
            within(w, type, value->number, path);
            return;
        default: within(w, type, value->number, path);
    }
}
static void check_map(Work *w, const Layout *layout, const kvp_value *map, bool beyond, const Path *path) {
    if (map->layout != layout->number) refuse(w, KVP_E_BAD_TYPE, path);
    for (int i = 0; i < layout->count; i++) {
        Path here = {path, layout->fields[i].name, 0};
        if (map->items[i].kind) check_value(w, &layout->fields[i].type, &map->items[i], beyond, &here);
        else if (layout->fields[i].required) refuse(w, KVP_E_MISSING_FIELD, &here);
    }
    check_rules(w, layout, map, path);
}
