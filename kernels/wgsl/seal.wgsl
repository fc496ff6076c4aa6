// seal.wgsl: re-codes a full page's K per channel from the Int8 Token values of its tokens. Included by append.wgsl.

// A token's value in the open form: from the tail page, or of this call's K.
fn open_value(job: Job, head: u32, tail: Run, t: u32, d: u32) -> f32 {
    var code = 0;
    if t < job.first {
        let word = load_word(tail.buffer, tail.at * 4u + (d / 16u * $(PS)u + t) * 4u + d % 16u / 4u);
        code = extractBits(bitcast<i32>(word), d % 4u * 8u, 8u);
    } else {
        code = extractBits(bitcast<i32>(code_0(job, head, t, d)), 0u, 8u);
    }
    return f32(code) * f16_value(param[t]);
}

fn seal(job: Job, head: u32, tid: u32) {
    let home = run_of(job.page, head);
    let tail = run_of(job.tail, head);
    for (var t = tid; t < job.first; t += $(THREADS)u) {
        param[t] = (load_word(tail.buffer, tail.at * 4u + $(D * PS / 4)u + t / 2u) >> (t % 2u * 16u)) & 0xFFFFu;
    }
    workgroupBarrier();
    for (var d = tid; d < $(D)u; d += $(THREADS)u) {
        var least = open_value(job, head, tail, 0u, d);
        var most = least;
        for (var t = 1u; t < $(PS)u; t++) {
            let x = open_value(job, head, tail, t, d);
            least = min(least, x);
            most = max(most, x);
        }
        channel[d] = int4_param(least, most);
        store_word(home.buffer, home.at * 4u + $(K_PARAMS)u + d, channel[d]);
    }
    workgroupBarrier();
    for (var i = tid; i < $(PS * D / 8)u; i += $(THREADS)u) {
        let row = i / 4u % $(PS / 2)u;
        let d = i / $(PS * 2)u * 16u + i % 4u * 4u;
        let t = row / 8u * 16u + row % 8u;
        var word = 0u;
#for n in 0..4
        word |= int4_code(open_value(job, head, tail, t, d + $(n)u), channel[d + $(n)u]) << $(8 * n)u;
        word |= int4_code(open_value(job, head, tail, t + 8u, d + $(n)u), channel[d + $(n)u]) << $(8 * n + 4)u;
#end
        store_word(home.buffer, home.at * 4u + i, word);
    }
}
