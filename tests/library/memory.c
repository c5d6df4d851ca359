/* Everything that libkvproto does with memory, done again and again with one allocation more that succeeds: each time it says NO_MEMORY, or is through, and gives all of it back.
 * Arguments: files with a frame, the two Descriptions of a pair, and a message in JSON form. */
#include <kvproto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t held, allowed;
static void *allocate(void *state, size_t size) {
    (void)state;
    if (!allowed) return NULL;
    allowed--;
    held++;
    return malloc(size);
}
static void release(void *state, void *block) {
    (void)state;
    held--;
    free(block);
}
static const kvp_options COUNTED = {.size = sizeof COUNTED, .allocate = allocate, .release = release};
typedef struct { char bytes[1 << 16]; size_t size; } File;
static File files[4];
static void read_file(const char *path, File *file) {
    FILE *from = fopen(path, "rb");
    if (!from) exit(2);
    file->size = fread(file->bytes, 1, sizeof file->bytes, from);
    fclose(from);
}
static int codes(void) { /* of all that is asked, in order, the first that is not 0 */
    kvp_error error = {0};
    kvp_message *decoded = NULL, *json = NULL, *list = NULL, *filled = kvp_message_new(KVP_GEOMETRY, &COUNTED);
    kvp_description *sides[2] = {NULL, NULL};
    kvp_plan *plan = NULL;
    kvp_program *program = NULL;
    kvp_deal *deal = NULL;
    kvp_stream *stream = kvp_stream_new(&COUNTED);
    size_t size;
    int code = filled && stream ? 0 : KVP_NO_MEMORY;
    if (!code) code = kvp_decode(files[0].bytes, files[0].size, &COUNTED, &decoded, &error);
    if (!code) code = kvp_from_json(KVP_GEOMETRY, files[3].bytes, files[3].size, &COUNTED, &json, &error);
    if (!code) code = kvp_list_from_json(KVP_GRANTS, "[]", 2, &COUNTED, &list, &error);
    for (int i = 0; i < 40 && !code; i++) kvp_set_bytes(filled, kvp_add_map(filled, kvp_fill(filled), KVP_GEOMETRY_FACTS), KVP_FACT_VALUE, files[3].bytes, 2000);
    if (!code) code = kvp_encode_struct(filled, NULL, 0, &size, &error) == KVP_NO_MEMORY ? KVP_NO_MEMORY : 0;
    if (!code) code = kvp_stream_feed(stream, files[0].bytes, files[0].size);
    for (int i = 0; i < 2 && !code; i++) code = kvp_describe(files[1 + i].bytes, files[1 + i].size, &COUNTED, &sides[i], &error);
    if (!code) code = kvp_deal_new(&kvp_field(kvp_description_root(sides[0]), KVP_GEOMETRY_GROUPS)->items[0], &COUNTED, &deal, &error);
    if (!code) code = kvp_plan_new(sides[0], sides[1], KVP_FEATURE_BIT(KVP_FEATURE_FEW_SOURCES), &COUNTED, &plan, &error);
    const kvp_value *routed = sides[0] ? kvp_field(kvp_description_root(sides[0]), KVP_GEOMETRY_RANKS)->items : NULL;
    const kvp_value nothing = {.kind = KVP_KIND_LIST};
    const kvp_end ends[2] = {{.description = sides[0], .rank = kvp_number(routed, KVP_RANK_RANK)}, {.description = sides[1], .rank = 1u << 20, .columns = &nothing, .windows = &nothing}};
    if (!code) code = kvp_lower(plan, &ends[0], &ends[1], &COUNTED, &program, &error);
    kvp_program_free(program);
    kvp_plan_free(plan);
    kvp_deal_free(deal);
    kvp_description_free(sides[0]);
    kvp_description_free(sides[1]);
    kvp_stream_free(stream);
    kvp_message_free(filled);
    kvp_message_free(list);
    kvp_message_free(json);
    kvp_message_free(decoded);
    return code;
}
int main(int count, char **paths) {
    for (int i = 0; i < 4 && i + 1 < count; i++) read_file(paths[i + 1], &files[i]);
    for (size_t n = 0;; n++) {
        allowed = n;
        int code = codes();
        if (held) return printf("%zu blocks are left after %zu\n", held, n), 1;
        if (!code) return printf("%zu allocations\n", n), 0;
        if (code != KVP_NO_MEMORY) return printf("%s after %zu\n", kvp_code_name(code), n), 1;
    }
}
