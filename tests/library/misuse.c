/* What a careless engine does with libkvproto: it is told, and nothing breaks. Prints nothing if all is as it should be. */
#include <kvproto.h>
#include <stdio.h>
#include <string.h>

static int failures;
#define EXPECT(what) ((what) ? (void)0 : (void)(failures++, printf("line %d: %s\n", __LINE__, #what)))

static void values(void) {
    kvp_message *message = kvp_message_new(KVP_PING, NULL);
    kvp_error error;
    uint8_t frame[64];
    size_t size;
    EXPECT(kvp_encode(message, frame, sizeof frame, &size, &error) == KVP_E_MISSING_FIELD && !strcmp(error.path, "session"));
    kvp_set_number(message, kvp_fill(message), KVP_PING_SESSION, 7);
    kvp_set_number(message, kvp_fill(message), KVP_PING_REQUEST, 8);
    EXPECT(kvp_encode(message, NULL, 0, &size, &error) == KVP_NO_ROOM && size == 21);
    EXPECT(kvp_encode(message, frame, size - 1, &size, &error) == KVP_NO_ROOM && size == 21);
    EXPECT(!kvp_encode(message, frame, size, &size, &error) && size == 21 && !error.code);
    kvp_message *decoded;
    EXPECT(!kvp_decode(frame, size, NULL, &decoded, &error) && kvp_number(kvp_root(decoded), KVP_PING_REQUEST) == 8);
    EXPECT(!kvp_fill(decoded) && kvp_field(kvp_root(decoded), 99)->kind == KVP_KIND_NONE && kvp_field(NULL, 1)->kind == KVP_KIND_NONE);
    kvp_set_number(decoded, (kvp_value *)kvp_root(decoded), KVP_PING_SESSION, 1);
    EXPECT(kvp_encode(decoded, frame, sizeof frame, &size, &error) == KVP_MISUSE);
    kvp_message_free(decoded);
    kvp_set_bytes(message, kvp_fill(message), KVP_PING_SESSION, "x", 1); /* a number */
    kvp_set_number(message, NULL, KVP_PING_SESSION, 1);
    EXPECT(!kvp_add_map(message, kvp_fill(message), KVP_PING_SESSION) && !kvp_set_map(message, kvp_fill(message), 99));
    EXPECT(kvp_encode(message, frame, sizeof frame, &size, &error) == KVP_MISUSE);
    kvp_message_free(message);
    EXPECT(!kvp_message_new(-1, NULL) && !kvp_message_new(12345, NULL) && kvp_encode(NULL, frame, 64, &size, &error) == KVP_MISUSE);
    EXPECT(kvp_decode_struct(-5, frame, 0, NULL, &decoded, &error) == KVP_MISUSE && !decoded);
    EXPECT(kvp_decode(NULL, 0, NULL, &decoded, NULL) == KVP_E_TRUNCATED && kvp_from_json(KVP_PING, NULL, 0, NULL, &decoded, NULL) == KVP_E_BAD_TYPE);
}
static void lists(void) { /* one that is filled stays where it is while it grows */
    kvp_message *message = kvp_message_new(KVP_GEOMETRY, NULL), *again;
    kvp_value *facts[100], *root = kvp_fill(message);
    kvp_error error;
    for (int i = 0; i < 100; i++) facts[i] = kvp_add_map(message, root, KVP_GEOMETRY_FACTS);
    for (int i = 0; i < 100; i++) {
        char name[8];
        kvp_set_bytes(message, facts[i], KVP_FACT_NAME, name, (size_t)snprintf(name, sizeof name, "f%02d", i));
        kvp_set_bytes(message, facts[i], KVP_FACT_VALUE, "", 0);
        kvp_set_number(message, facts[i], KVP_FACT_RULE, KVP_FACT_RULE_WARN);
    }
    char text[1 << 14];
    size_t size;
    EXPECT(!kvp_to_json(kvp_root(message), text, sizeof text, &size) && kvp_to_json(kvp_root(message), text, 10, &size) == KVP_NO_ROOM);
    EXPECT(!kvp_to_json(&kvp_field(kvp_root(message), KVP_GEOMETRY_FACTS)->items[99], text, sizeof text, &size) && !strncmp(text, "{\"name\": \"f99\"", 14));
    EXPECT(kvp_encode_struct(message, text, sizeof text, &size, &error) == KVP_E_MISSING_FIELD && !strcmp(error.path, "replica"));
    EXPECT(kvp_from_json(KVP_FACT, text, size, NULL, &again, &error) != 0);
    kvp_message_free(message);
}
static void bounds(void) {
    const kvp_options little = {.size = sizeof little, .max_memory = 4096}, older = {.size = sizeof(size_t)};
    kvp_message *message;
    kvp_error error;
    char text[1 << 13];
    memset(text, '[', sizeof text); /* deeper than any text may be */
    EXPECT(kvp_from_json(KVP_PING, text, sizeof text, NULL, &message, &error) == KVP_E_BAD_TYPE && !message);
    memset(text, '0', sizeof text);
    text[0] = '"', text[sizeof text - 1] = '"';
    EXPECT(kvp_from_json(KVP_PING, text, sizeof text, &little, &message, &error) == KVP_NO_MEMORY && !message);
    EXPECT(kvp_from_json(KVP_PING, "{\"session\": \"1\", \"request\": \"2\"}", 32, &older, &message, &error) == 0);
    kvp_message_free(message);
    for (size_t n = 0; n < sizeof text; n++) text[n] = 'n';
    text[0] = '{', text[1] = '"', memcpy(text + 4000, "\": 1}", 5);
    EXPECT(kvp_from_json(KVP_PING, text, 4005, NULL, &message, &error) == KVP_E_UNKNOWN_FIELD && strlen(error.path) == KVP_PATH - 1);
}
int main(void) {
    values();
    lists();
    bounds();
    EXPECT(!strcmp(kvp_version(), KVP_LIBRARY_VERSION) && !strcmp(kvp_code_name(KVP_E_BAD_TYPE), "BAD_TYPE") && !kvp_code_name(12) && !kvp_layout_name(-1));
    bool optional = false;
    EXPECT(!strcmp(kvp_part_named("k_cache", 7, &optional), "k") && !kvp_part_named("nothing", 7, NULL));
    return failures != 0;
}
