// The official Node client: the facts come on standard input.  Run in the folder where it is installed.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { join } from 'node:path'

const { OpenAI } = createRequire(join(process.argv[2], 'package.json'))('openai')
const facts = JSON.parse(readFileSync(0))
const client = new OpenAI({ baseURL: facts.url, apiKey: 'none', maxRetries: 0 })
const user = (...parts) => ({
  role: 'user',
  content: parts.map(part => part.startsWith('data:')
    ? { type: 'image_url', image_url: { url: part } } : { type: 'text', text: part }),
})
const asked = { model: facts.model, temperature: 0, messages: [user(facts.image, facts.question)] }

function checkUsage(usage) {
  assert.equal(usage.prompt_tokens, facts.prompt_tokens)
  assert.equal(usage.completion_tokens, facts.completion_tokens)
}

function checkWhole(answer) {
  assert.equal(answer.choices[0].message.content, facts.answer)
  assert.equal(answer.choices[0].finish_reason, 'stop')
  checkUsage(answer.usage)
}

async function models() {
  const ids = []
  for await (const model of client.models.list()) ids.push(model.id)
  assert.deepEqual(ids, [facts.model])
}

async function streamed(usage) {
  const options = usage ? { stream_options: { include_usage: true } } : {}
  const chunks = []
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, ...options })) {
    chunks.push(chunk)
  }
  const choices = chunks.flatMap(chunk => chunk.choices)
  assert.equal(choices.map(choice => choice.delta.content ?? '').join(''), facts.answer)
  assert.equal(choices.at(-1).finish_reason, 'stop')
  assert.equal(chunks.length - choices.length, usage ? 1 : 0)
  if (usage) checkUsage(chunks.at(-1).usage)
}

async function accumulated() {
  const runner = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } })
  checkWhole(await runner.finalChatCompletion())
}

const tool = {
  type: 'function',
  function: {
    name: 'look',
    parameters: {
      type: 'object',
      properties: { at: { enum: ['the circle', 'the square'] } },
      required: ['at'],
      additionalProperties: false,
    },
  },
}

async function toolHistory() {
  const call = { id: 'call_1', type: 'function', function: { name: 'look', arguments: '{"at": "the circle"}' } }
  const messages = [
    user(facts.image, 'Look.'),
    { role: 'assistant', content: null, tool_calls: [call] },
    { role: 'tool', tool_call_id: 'call_1', content: 'It is there.' },
    { role: 'user', content: facts.question }]
  const answer = await client.chat.completions.create({ ...asked, messages })
  assert.equal(answer.choices[0].message.content, facts.answer)
  assert.equal(answer.usage.prompt_tokens, facts.history_tokens)
}

async function demandedCall() {
  const fields = { ...asked, tools: [tool], tool_choice: 'required' }
  const streamed = await client.chat.completions.stream(fields).finalChatCompletion()
  for (const answer of [await client.chat.completions.create(fields), streamed]) {
    assert.equal(answer.choices[0].finish_reason, 'tool_calls')
    const called = answer.choices[0].message.tool_calls[0]
    assert.equal(called.function.name, 'look')
    assert.ok(['the circle', 'the square'].includes(JSON.parse(called.function.arguments).at))
  }
}

async function refused(kind, status, code, fields) {
  await assert.rejects(client.chat.completions.create({ ...asked, ...fields }), error => {
    assert.ok(error instanceof kind, String(error))
    assert.equal(error.status, status)
    assert.equal(error.code, code)
    assert.ok(error.requestID)
    return true
  })
}

async function leaving() {
  const stream = await client.chat.completions.create(
    { model: facts.model, messages: [user('Hello')], stream: true, max_tokens: 2000, ignore_eos: true })
  for await (const chunk of stream) {
    assert.equal(chunk.object, 'chat.completion.chunk')
    break
  }
}

await models()
checkWhole(await client.chat.completions.create(asked))
await streamed(false)
await streamed(true)
await accumulated()
await toolHistory()
await demandedCall()
await leaving()
await refused(OpenAI.NotFoundError, 404, 'model_not_found', { model: 'another' })
await refused(OpenAI.BadRequestError, 400, 'invalid_image_format', { messages: [user(facts.broken_image, 'What?')] })
await refused(OpenAI.BadRequestError, 400, 'context_length_exceeded', { messages: [user(facts.too_long)] })
