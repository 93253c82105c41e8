-- In how many shards a topic is published. The keys are those of a topic with one shard, which
-- everybody knows, however many there are.
--
-- ARGV: the number, from whoever publishes; nothing to ask for it
-- Answers: the number, or nil

-- Out of memory, Redis keeps no note of it.
if ARGV[1] then redis.pcall('HSET', helper, 'shards', ARGV[1]) end
return call('HGET', helper, 'shards')
