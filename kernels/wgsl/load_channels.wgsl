// load_channels.wgsl: the lane's channels of the sealed page `page_ahead`. Included by decode_split.wgsl and plane_channel.wgsl.
let of_page = run_of(page_ahead, head);
#for n in 0..((UNITS * 4 + T - 1) / T)
channel_raw_$(n) = load_vec(of_page.buffer, of_page.at + $(K_PARAMS / 4)u + min(lane + $(T * n)u, $(UNITS * 4 - 1)u));
#end
